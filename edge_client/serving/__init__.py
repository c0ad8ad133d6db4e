"""Answers pictures with the promoted model: sources, the model, its drift, HTTP and results."""
