"""Checks configurations, makes Programs, and predicts costs."""
