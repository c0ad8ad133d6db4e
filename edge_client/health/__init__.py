"""The state of a device: limits, status, metrics, and the checks of `edge-client doctor`."""
