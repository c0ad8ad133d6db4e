"""Ways for messages to travel: in memory and over MQTT, behind one small interface."""
