"""Models in and out: Hugging Face folders, ONNX, plain weights, model cards."""
