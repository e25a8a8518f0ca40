// Two verdicts from outside: ajv on documents, and the official parser on the AsyncAPI document.
//
//   node check.mjs schemas DIR   reads [[type, document], …] from stdin, prints [true, false, …]
//   node check.mjs asyncapi FILE prints what the parser has to say, as [[severity, message, path], …]

import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.cwd(), "package.json"));
const [what, where] = process.argv.slice(2);

if (what === "schemas") {
  const { default: Ajv } = require("ajv/dist/2020.js");
  const ajv = new Ajv({ strict: true, allErrors: false });
  const validators = new Map();
  for (const name of readdirSync(where)) {
    validators.set(name.replace(/\.json$/, ""), ajv.compile(JSON.parse(readFileSync(join(where, name), "utf8"))));
  }
  const documents = JSON.parse(readFileSync(0, "utf8"));
  process.stdout.write(JSON.stringify(documents.map(([type, document]) => validators.get(type)(document))));
} else if (what === "asyncapi") {
  const { Parser } = require("@asyncapi/parser");
  const { document, diagnostics } = await new Parser().parse(readFileSync(where, "utf8"));
  const said = diagnostics.map((each) => [each.severity, each.message, each.path.join("/")]);
  process.stdout.write(JSON.stringify({ said, messages: document ? document.messages().all().length : 0 }));
} else {
  process.stderr.write("usage: node check.mjs schemas DIR | asyncapi FILE\n");
  process.exit(2);
}
