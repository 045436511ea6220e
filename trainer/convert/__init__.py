"""Import and export of models: Hugging Face folders, ONNX, plain weights and model cards."""
