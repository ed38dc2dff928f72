"""Ray Serve: the producer, the specialist replicas, the registrar and the transports between them."""
