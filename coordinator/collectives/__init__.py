"""What a group moves: tensors, objects, tensor dicts and single transfers."""
