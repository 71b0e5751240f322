"""What runs and when: requests, schedule, counts. No tensors."""
