"""Benchmarks: what a device's part costs here, beside what a user would write with torch and timm today."""
