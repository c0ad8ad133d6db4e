"""Secrets of every kind, to be planted wherever a report of a fault reads, and none of which it may have."""

import zipfile
from pathlib import Path

KEY = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIHh4eHh4eHh4\n-----END PRIVATE KEY-----"
SECRETS = {
    "broker": ("joined mqtt://fedvit:hunter2@broker.lan:1883 again", ["hunter2"]),
    "record": ("postgresql+psycopg://ann:s3cr%t@db:5432/fedvit", ["s3cr%t"]),
    "token": ("edge-client join fedvit1-abcDEF_123-xyz --state x", ["abcDEF_123-xyz"]),
    "API token": ("refused fvt_AbC-dEf_0123456789 of ann", ["AbC-dEf_0123456789"]),
    "webhook": ('url = "https://hooks.example.com/services/T000/B000/XXXX"', ["T000", "XXXX"]),
    "webhook by name": ('webhook = "https://t0psecret.example.net"', ["t0psecret"]),
    "query": ("POST https://hooks.example.com?key=qu3ry 200", ["qu3ry"]),
    "signed": ("GET https://s3.example.com/b/k?X-Amz-Signature=deadbeef&x=1 403", ["deadbeef"]),
    "toml": ('password = "open sesame"\nport = 1', ["open sesame"]),
    "json": ('{"aws_secret_access_key": "wJalrXUtnFEMI", "n": 1}', ["wJalrXUtnFEMI"]),
    "environment": ("FEDVIT_BROKER_PASSWORD=abc123 coordinator serve", ["abc123"]),
    "flag": ("mosquitto_pub --password s3same --topic t", ["s3same"]),
    "header": ("Authorization: Bearer eyJhbGciOi.J9", ["eyJhbGciOi"]),
    "basic": ("authorization: Basic YW5uOnBhc3M=", ["YW5uOnBhc3M"]),
    "cookie": ("Cookie: theme=dark; session=c00kie", ["c00kie"]),
    "bearer": ("sent Bearer abcdef0123456789 to it", ["abcdef0123456789"]),
    "hashed": ("pi-1:$7$101$c2FsdA==$aGFzaGVk==", ["aGFzaGVk"]),
    "hub": ("login with hf_AbCdEfGhIjKlMnOpQr failed", ["hf_AbCdEf"]),
    "key": (f"found {KEY} in a file", ["MC4CAQ"]),
    "cut key": (KEY[:50], ["MC4CAQ"]),
    "account": ("key id AKIAIOSFODNN7EXAMPLE was refused", ["AKIAIOSFODNN7EXAMPLE"]),
    "people": ("mail ann.b@example.org from 192.168.7.21, b8:27:eb:12:34:56", ["ann.b", "192.168.7.21", "b8:27:eb"]),
    "address": ("no route to fd12:3456:789a::21 or fe80::1", ["fd12:3456", "fe80"]),
    "user": ("cannot open /home/bettina/x.toml", ["bettina"]),
    "picture": ("skipped 20260704-party.JPG: damaged", ["20260704-party"]),
}
"""Texts by kind, each with what must not be left of it."""
LINES = "".join(f"{text}\n" for text, _ in SECRETS.values() if text != KEY[:50])
"""All of them, as the lines of one log."""
WORDS = [word for _, words in SECRETS.values() for word in words]


def read_report(file: Path) -> dict[str, str]:
    """Read the files of a report."""
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def find_planted(files: dict[str, str], words: list[str]) -> dict[str, list[str]]:
    """Find which of the words are left in a report, by the names of its files."""
    found = {name: [word for word in words if word in text] for name, text in files.items()}
    return {name: left for name, left in found.items() if left}
