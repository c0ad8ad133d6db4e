"""A client of a coordinator's HTTP API, without torch and without further packages.

from fedvit.client import Service

service = Service.from_environment()
name = service.runs.submit({"method": "fedavg", "rounds": 20})
service.runs.wait(name)
"""

from fedvit.client.documents import Changed, ChangedModel, Device, Labels, Page, Round, Run, Submitted, UsedModel
from fedvit.client.service import Service

__all__ = ["Changed", "ChangedModel", "Device", "Labels", "Page", "Round", "Run", "Service", "Submitted", "UsedModel"]
