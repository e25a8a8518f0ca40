// Asks for a job and prints the answer: go mod init example && go get github.com/nats-io/nats.go && go run . [URL [ID]]
// Send it again under the same id, and it is the same job.
package main

import (
	"fmt"
	"log"
	"os"
	"time"

	"github.com/nats-io/nats.go"
)

func argument(position int, otherwise string) string {
	if len(os.Args) > position {
		return os.Args[position]
	}
	return otherwise
}

func main() {
	id := argument(2, "order-17")
	connection, err := nats.Connect(argument(1, nats.DefaultURL))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()

	message := nats.NewMsg("apportion.v1.main.ask.default.JobRequested")
	message.Header.Set("Nats-Msg-Id", "default /shop "+id)
	message.Header.Set("ce-specversion", "1.0")
	message.Header.Set("ce-id", id)
	message.Header.Set("ce-source", "/shop")
	message.Header.Set("ce-type", "io.apportion.JobRequested.v1")
	message.Data = []byte(`{"queue": "main", "workload": {"command": ["/bin/true"]}, "resources": {"gpu_milli": 250}}`)

	reply, err := connection.RequestMsg(message, 10*time.Second)
	if err != nil {
		log.Fatalf("%v: the outcome is unknown, send it again under the same id", err)
	}
	fmt.Println(string(reply.Data))
}
