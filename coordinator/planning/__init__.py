"""What devices could do: configurations checked, Programs made, costs predicted."""
