"""The requests and conditions of the owner: readiness, labels, the own model, measurements."""
