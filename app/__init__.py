"""The face: REST, server-sent events, the command line and the demo."""
