"""The network side: gRPC services and the fd socket; proto messages to core values and back."""
