"""Transports of messages: in memory and over MQTT, with one small interface."""
