import os

# official builds of onnxruntime number the machine and report to their maker, unless this is set before they are loaded
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
