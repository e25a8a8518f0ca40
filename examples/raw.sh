#!/usr/bin/env bash
# Asks for a job over a bare socket, in the bus's own text protocol, and prints the answer: examples/raw.sh [URL [ID]]
# For machines that have a shell and nothing else. Send it again under the same id, and it is the same job.
set -euo pipefail
export LC_ALL=C # lengths are bytes

url=${1:-nats://127.0.0.1:4222}
id=${2:-order-17}
place=${url#nats://}
inbox="_INBOX.raw-$$-$RANDOM$RANDOM"
subject=apportion.v1.main.ask.default.JobRequested
body='{"queue": "main", "workload": {"command": ["/bin/true"]}, "resources": {"gpu_milli": 250}}'
headers=$'NATS/1.0\r\n'
headers+="Nats-Msg-Id: default /shop $id"$'\r\n'
headers+=$'ce-specversion: 1.0\r\n'
headers+="ce-id: $id"$'\r\n'
headers+=$'ce-source: /shop\r\nce-type: io.apportion.JobRequested.v1\r\n\r\n'

exec 3<>"/dev/tcp/${place%:*}/${place##*:}"
read -r -t 10 _info <&3 # INFO {...}
{
  printf 'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true,"protocol":1,"lang":"bash","version":"1","name":"raw.sh"}\r\n'
  printf 'SUB %s 1\r\n' "$inbox"
  printf 'HPUB %s %s %d %d\r\n%s%s\r\n' "$subject" "$inbox" "${#headers}" "$((${#headers} + ${#body}))" "$headers" "$body"
} >&3

while IFS= read -r -t 15 line <&3; do
  case $line in
    PING*) printf 'PONG\r\n' >&3 ;;
    MSG*)
      size=${line##* }
      IFS= read -r -t 10 -N "${size%$'\r'}" answer <&3
      printf '%s\n' "$answer"
      exit 0
      ;;
    HMSG*)
      echo "raw.sh: nobody answers on $subject: is admission running?" >&2
      exit 1
      ;;
    -ERR*)
      echo "raw.sh: the bus says $line" >&2
      exit 1
      ;;
  esac
done
echo "raw.sh: no answer from $url within 15 s: send it again under the same id" >&2
exit 1
