"""What others do about the same question, on the same rounds: the floors that the relation model has to beat."""
