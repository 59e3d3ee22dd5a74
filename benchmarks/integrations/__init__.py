"""How long each framework's own save call blocks training, with its stock way to save and with ours."""
