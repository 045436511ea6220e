"""Fine-tuning: a pre-trained BERT with a head for a task, trained and measured as the task's authors do."""
