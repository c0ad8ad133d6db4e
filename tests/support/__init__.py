"""What several files of tests share: fake devices and coordinators, brokers, builders of messages, real processes."""
