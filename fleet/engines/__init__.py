"""Engines of a simulation beside onnxruntime: devices' work without devices, for research at the papers' scale."""
