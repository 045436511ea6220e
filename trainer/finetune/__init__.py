"""Fine-tuning: a pre-trained BERT with a task's head, trained and evaluated as the task's authors do."""
