#!/usr/bin/env python3
"""Horovod's TorchEstimator on Spark, which builds the optimizer itself and takes a compression as
an argument.

    pip install 'pyspark==3.4.4' 'petastorm==0.12.1' 'pyarrow==10.0.1' 'pandas<2.2'     # and Java
    python examples/spark_estimator.py --compression dgc:ratio=0.05

Two ranks on this machine learn scikit-learn's handwritten digits. Prints the accuracy of the model
that the estimator returns.
"""

import argparse
import os
import sys
import tempfile

import numpy as np
import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import LocalStore
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

import horovod_compress.torch as hvdc


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compression", default="dgc:ratio=0.05", metavar="SPEC")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    images, labels = load_digits(return_X_y=True)
    rows = [(image.tolist(), int(label)) for image, label in zip(images / 16, labels)]
    train = spark.createDataFrame(rows[:1500], ["features", "label"])

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    with tempfile.TemporaryDirectory() as folder:
        estimator = TorchEstimator(
            backend=SparkBackend(num_proc=2, stdout=sys.stdout, stderr=sys.stderr, use_gloo=True),
            store=LocalStore(folder),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            loss=lambda output, label: torch.nn.functional.cross_entropy(
                output, label.long().flatten()
            ),
            gradient_compression=hvdc.Compression.from_spec(options.compression),
            input_shapes=[[-1, 64]],
            feature_cols=["features"],
            label_cols=["label"],
            batch_size=32,
            epochs=options.epochs,
            verbose=0,
        )
        trained = estimator.fit(train).getModel()
    with torch.no_grad():
        found = trained(torch.tensor(images[1500:] / 16, dtype=torch.float32)).argmax(1).numpy()
    print(
        f"{options.compression}: {100 * np.mean(found == labels[1500:]):.1f} % of the digits that "
        f"it has not seen are right"
    )


if __name__ == "__main__":
    main()
