"""What the device allows without trusting the coordinator, and its ledger of everything that left."""
