"""Trains a small convolutional network on several ranks with Keras, with any compression:

    horovodrun -np 2 python examples/keras_images.py --compression dgc:ratio=0.001,warmup_steps=300

Compressions: none and fp16 are Horovod's own; everything else is a spec of horovod_compress. With
--adam --updates 8 it is not gradients that are compressed, but what eight steps of each rank's own
Adam add to the variables. With --checkpoints the model, and what the compression holds back on each
rank, are saved after every epoch; --resume continues from there. Keras 3 takes --updates:

    horovodrun -np 2 python examples/keras_images.py --adam --updates 4 \\
        --compression adacomp:bin_length=64,dense=fp16
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from images import load
from tensorflow import keras

import horovod_compress.tensorflow as hvdc


def network(side):
    """Two convolutions and two dense layers: 421 642 parameters for 28 × 28 images."""
    return keras.Sequential(
        [
            keras.Input((side, side, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="none", metavar="SPEC")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--adam", action="store_true", help="Adam in place of SGD with momentum")
    parser.add_argument("--lr", type=float, help="default: 0.05 for SGD, 0.001 for Adam")
    parser.add_argument(
        "--updates",
        type=int,
        default=0,
        metavar="STEPS",
        help="compress what so many steps add, in place of gradients",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", help="folder of IDX files; default: Fashion-MNIST if installed, else the digits"
    )
    parser.add_argument("--images", type=int, help="train on the first so many images only")
    parser.add_argument("--checkpoints", metavar="FOLDER")
    parser.add_argument(
        "--resume",
        type=int,
        default=0,
        metavar="EPOCH",
        help="continue after this epoch of --checkpoints",
    )
    options = parser.parse_args()
    if options.resume and not options.checkpoints:
        parser.error("--resume: say where with --checkpoints")

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(options.seed)
    name, data = load(options.data)
    images, labels = (part[: options.images][hvd.rank() :: hvd.size()] for part in data["train"])
    model = network(images.shape[-1])

    optimizer = (
        keras.optimizers.Adam(options.lr or 0.001)
        if options.adam
        else keras.optimizers.SGD(options.lr or 0.05, momentum=0.9)
    )
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(
        options.compression
    )
    ours = bool(compression is None or options.updates)
    if options.updates:
        optimizer = hvdc.UpdateOptimizer(optimizer, options.compression, every=options.updates)
        compression = optimizer.compression
        callbacks.append(hvdc.ShareUpdates())
    else:
        if ours:
            compression = hvdc.Compression.from_spec(options.compression)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    if options.checkpoints:
        path = os.path.join(options.checkpoints, "{epoch:02d}")
        # Keras 3, which alone has `ops`, knows no other kind.
        kind = ".weights.h5" if hasattr(keras, "ops") else ".model"
        before = path.format(epoch=options.resume) if options.resume else None
        if before:
            # Weights come with the optimizer's variables, where it has some.
            optimizer.build(model.trainable_variables)
            model.load_weights(before + kind)
        if hvd.rank() == 0:
            callbacks.append(keras.callbacks.ModelCheckpoint(path + kind, save_weights_only=True))
        if ours:
            callbacks.append(hvdc.StateCheckpoint(compression, path, restore=before))
    model.fit(
        images.transpose(0, 2, 3, 1),
        labels,
        batch_size=options.batch,
        epochs=options.epochs,
        initial_epoch=options.resume,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    test = [part[hvd.rank() :: hvd.size()] for part in data["test"]]
    _, accuracy = model.evaluate(test[0].transpose(0, 2, 3, 1), test[1], verbose=0)
    accuracy = hvd.allreduce(accuracy, name="accuracy")
    if hvd.rank() == 0:
        what = f"{options.compression} on updates" if options.updates else options.compression
        print(
            f"{name}, {hvd.size()} ranks, {what}: test accuracy {100 * float(accuracy):.2f} %",
            end="",
        )
        stats = compression.stats() if ours else {"steps": 0}
        if stats["steps"]:
            print(
                f", {stats['bytes_sent'] / stats['steps'] / 1e3:.1f} kB an exchange and rank, "
                f"{stats['ratio']:.0f} times less",
                end="",
            )
        print()


if __name__ == "__main__":
    main()
