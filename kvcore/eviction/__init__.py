"""In which order free blocks lose their content: LRU, priorities, deadlines."""
