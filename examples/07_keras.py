"""A compiled Keras model whose `fit` runs on two ranks: weights, History and callbacks are those of one process.

python examples/07_keras.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
from sklearn.datasets import load_digits

import paceline as pl


def digits_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),  # of the whole batch, also on two ranks
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main(plan, devices, epochs=8, samples=1797):
    pixels, digits = load_digits(return_X_y=True)
    x, y = (pixels / 16).reshape(-1, 8, 8, 1).astype("float32")[:samples], digits[:samples]
    keras.utils.set_random_seed(0)
    model = digits_model()
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = pl.keras.fit(  # was: model.fit(
        model,
        x,
        y,
        batch_size=64,
        epochs=epochs,
        validation_split=0.2,
        verbose=0,
        plan=plan,
        devices=devices,  # without it, on a machine with GPUs, each rank has one
        callbacks=[keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)],
    )
    print(
        f"{plan}: {len(history.history['loss'])} epochs, validation loss {min(history.history['val_loss']):.4f}, "
        f"accuracy {max(history.history['val_accuracy']):.4f}"
    )
    return model, history


if __name__ == "__main__":
    main("data=1", "cpu:0")
    main("data=2", "cpu:0-1")
