import fedvit as fedvit  # what it says to the engine must be said first
