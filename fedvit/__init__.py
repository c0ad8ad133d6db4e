import os


def disable_telemetry() -> None:
    """Keep onnxruntime from numbering this machine and reporting to its maker, as its official builds do.

    Call it before the engine is loaded, and again where the environment was cleared.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


disable_telemetry()
