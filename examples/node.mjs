// Asks for a job and prints the answer: npm install @nats-io/transport-node; node examples/node.mjs [URL [ID [KEY]]]
// Send it again under the same id, and it is the same job.
// KEY is the file of the tenant's seed, where the bus asks for one: <data dir>/keys/tenant-default.nk.
import { readFileSync } from "node:fs";
import { connect, headers, nkeyAuthenticator } from "@nats-io/transport-node";

const [url = "nats://127.0.0.1:4222", id = "order-17", key] = process.argv.slice(2);
// Replies to a tenant come under a prefix of its own, so that nobody else can listen to them.
const keyed = key && {
  authenticator: nkeyAuthenticator(new TextEncoder().encode(readFileSync(key, "utf8").trim())),
  inboxPrefix: "_INBOX_tenant-default",
};
const connection = await connect({ servers: url, ...keyed });

const attributes = headers();
attributes.set("Nats-Msg-Id", `default /shop ${id}`);
attributes.set("ce-specversion", "1.0");
attributes.set("ce-id", id);
attributes.set("ce-source", "/shop");
attributes.set("ce-type", "io.apportion.JobRequested.v1");

const request = { queue: "main", workload: { command: ["/bin/true"] }, resources: { gpu_milli: 250 } };
const subject = "apportion.v1.main.ask.default.JobRequested";
const reply = await connection.request(subject, JSON.stringify(request), { timeout: 10_000, headers: attributes });
console.log(reply.string());
await connection.close();
