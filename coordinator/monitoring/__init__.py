"""The metrics of a coordinator for Prometheus; docs/monitoring.md lists them."""
