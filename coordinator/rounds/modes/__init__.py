"""The orders in which rounds follow each other; `coordinator.config.modes` names them."""
