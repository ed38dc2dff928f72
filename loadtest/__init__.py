"""An outside client: it knows the server's HTTP and nothing of its insides."""
