"""Damaged and hostile messages against both programs."""
