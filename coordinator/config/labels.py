"""Selection of devices by their labels: `site=berlin,board=rpi5`."""

from fedvit.errors import ConfigError


def parse_labels(text: str, key: str = "devices_where") -> dict[str, str]:
    """Parse the labels that a device must have; an empty text gives none. Raises ConfigError, naming `key`.

    >>> parse_labels("site=berlin, board=rpi5")
    {'site': 'berlin', 'board': 'rpi5'}
    """
    wanted: dict[str, str] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value) or name in wanted:
            raise ConfigError("FV1007", f"{key} = {text!r} must be written LABEL=VALUE,LABEL=VALUE, each label once")
        wanted[name] = value
    return wanted


def why_not_asked(devices_where: str, labels: dict[str, str], key: str = "devices_where") -> str | None:
    """The reason why a run does not select a device with these labels; None if it does. `key`: see `parse_labels`."""
    for name, value in parse_labels(devices_where, key).items():
        if labels.get(name) != value:
            has = f"has {name}={labels[name]}" if name in labels else f"has no label {name}"
            return f"it is for devices with {name}={value}, and this one {has}"
    return None
