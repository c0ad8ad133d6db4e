"""Findings of the doctor, for comparison."""

from edge_client.health.doctor_context import Finding


def levels(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings]
