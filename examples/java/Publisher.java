// Asks for a job and prints the answer, with io.nats:jnats on the class path: java Publisher.java [URL [ID]]
// Send it again under the same id, and it is the same job.

import io.nats.client.Connection;
import io.nats.client.Message;
import io.nats.client.Nats;
import io.nats.client.impl.Headers;
import io.nats.client.impl.NatsMessage;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

public class Publisher {
    public static void main(String[] arguments) throws Exception {
        String url = arguments.length > 0 ? arguments[0] : "nats://127.0.0.1:4222";
        String id = arguments.length > 1 ? arguments[1] : "order-17";
        String request = "{\"queue\": \"main\", \"workload\": {\"command\": [\"/bin/true\"]},"
                + " \"resources\": {\"gpu_milli\": 250}}";
        Headers headers = new Headers()
                .add("Nats-Msg-Id", "default /shop " + id)
                .add("ce-specversion", "1.0")
                .add("ce-id", id)
                .add("ce-source", "/shop")
                .add("ce-type", "io.apportion.JobRequested.v1");
        try (Connection connection = Nats.connect(url)) {
            Message message = NatsMessage.builder()
                    .subject("apportion.v1.main.ask.default.JobRequested")
                    .headers(headers)
                    .data(request, StandardCharsets.UTF_8)
                    .build();
            Message reply = connection.requestWithTimeout(message, Duration.ofSeconds(10)).get();
            System.out.println(new String(reply.getData(), StandardCharsets.UTF_8));
        }
    }
}
