"""Random training data in the files that the data processors of the public Model Zoo read."""

import csv
import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from zoo_cuts import PREDICTIONS, SEQUENCE, VOCABULARY, values

SPLITS = ("train", "val")
PICTURE_SIDE = 32  # of an image that the input function scales
IGNORED = -100  # the label of a token that is not predicted
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<unk>", "<s>", "</s>")
_LABELS = ("O", "B", "I")

Section: TypeAlias = dict[str, Any]
Numbers: TypeAlias = NDArray[Any]


class NoSamples(Exception):
    """Raised for a data processor whose files nothing here writes."""


class Samples:
    """Writes the files of one section of a configuration into a folder, and their paths into the section.

    Args:
        folder: The folder.
        section: The section.
        configuration: The whole configuration.
        files: The number of files.
        count: The number of samples in a file.
        length: Of a sample, in tokens.
        predictions: The number of tokens of a sample that are predicted, where not all are.
        patches: The number of tokens that are patches of an image.
    """

    def __init__(
        self,
        folder: Path,
        section: Section,
        configuration: Section,
        *,
        files: int = 2,
        count: int = 32,
        length: int = SEQUENCE,
        predictions: int = PREDICTIONS,
        patches: int = 4,
    ) -> None:
        self.folder = folder
        self.section = section
        self.configuration = configuration
        self.files = files
        self.count = count
        self.length = length
        self.predictions = predictions
        self.patches = patches
        self.vocabulary = min([VOCABULARY, *(size for size in values(configuration, "vocab_size"))])
        self.words = [*_SPECIAL_TOKENS, *(f"word{number}" for number in range(VOCABULARY))][: self.vocabulary]
        self.random = np.random.default_rng(0)

    def write(self) -> None:
        """Raises: NoSamples."""
        self.folder.mkdir(parents=True)
        folders = [name for name in self.section if name.endswith("data_dir")]
        for name in folders:
            self.section[name] = [str(self.folder)] if isinstance(self.section[name], list) else str(self.folder)
        if "dataset" in self.section:
            self.section["dataset"]["root"] = str(self.folder)
        if folders or "dataset" in self.section:
            kind = self.section.get("data_processor", "")
            writers = (writer for pattern, writer in _WRITERS if re.match(pattern, kind))
            writer = next(writers, None)
            if writer is None:
                raise NoSamples(f"there is no synthetic data for {kind}")
            writer(self)
        model = self.configuration.get("trainer", {}).get("init", {}).get("model", {})
        for section in (self.section, model):  # in release 2.10 the model names the file of the labels
            for name in [name for name in section if name.endswith("vocab_file")]:
                section[name] = str(self.folder / name)
                text = json.dumps({label: number for number, label in enumerate(_LABELS)})
                (self.folder / name).write_text(text if "label" in name else "\n".join(self.words))

    # --- Tokens in HDF5 -----------------------------------------------------------------------------------------------
    def language(self) -> None:
        self._hdf5(lambda: {"data": self._language_rows(self.section.get("use_vsl", False))})

    def preferences(self) -> None:
        parts = ("input_ids", "attention_mask", "labels")
        self._parameters({"features": [f"{side}_{part}" for side in ("chosen", "rejected") for part in parts]})
        self._hdf5(lambda: {"data": np.concatenate([self._language_rows(), self._language_rows()], axis=1)})

    def passages(self) -> None:
        parts = ("input_ids", "attention_mask", "token_type_ids")
        sides = ("questions", "ctx")
        self._parameters({f"data_{i}_features": [f"{side}_{part}" for part in parts] for i, side in enumerate(sides)})
        self._hdf5(lambda: {"data_0": self._passage_rows(()), "data_1": self._passage_rows((2,))})

    def masked_tokens(self) -> None:
        self._parameters({"dataset": {"training_objective": "mlm"}})
        self._hdf5(self._masked_rows)

    def images_with_texts(self) -> None:
        padding = np.zeros((self.count, 1, self.length), int)
        self._images_and_rows(padding, has_positions="trainer" not in self.configuration)  # left out since release 2.3

    def images_in_texts(self) -> None:
        """Texts whose tokens after the first are the patches of an image."""
        padding = np.zeros((self.count, 1, self.length), int)
        places = np.tile(np.arange(1, 1 + self.patches), (self.count, 1))
        is_patch = padding + np.isin(np.arange(self.length), places)
        self._images_and_rows(padding, is_patch, img_data_loc=places)

    def _images_and_rows(self, *more: Numbers, has_positions: bool = False, **others: Numbers) -> None:
        self._pictures(self.folder / "images", (PICTURE_SIDE, PICTURE_SIDE, 3), "jpg")
        self.section["img_data_dir"] = str(self.folder / "images")
        paths = np.array([[f"{number}.jpg".encode()] for number in range(self.count)], dtype=h5py.string_dtype())
        self._hdf5(
            lambda: {
                "data": np.concatenate([self._language_rows(has_positions), *more], axis=1),
                "img_path": paths,
                **others,
            }
        )

    def _masked_rows(self) -> dict[str, Numbers]:
        tokens = self._tokens((self.count, self.length))
        is_masked = self.random.random(tokens.shape) < self.predictions / self.length
        positions = self._positions() if self.section.get("use_vsl") else []
        return {
            "data": np.stack([tokens, np.ones_like(tokens), *positions], axis=1),
            "labels": np.where(is_masked, tokens, IGNORED)[:, None],
        }

    def _language_rows(self, positions: bool = False) -> Numbers:
        tokens = self._tokens((self.count, self.length + 1))
        rows = [tokens[:, :-1], np.ones_like(tokens[:, 1:]), tokens[:, 1:]]
        if positions:
            rows += self._positions()
        return np.stack(rows, axis=1)

    def _positions(self) -> list[Numbers]:
        """How many later tokens may look back at each token, and where it is."""
        order = np.tile(np.arange(self.length), (self.count, 1))
        return [order[:, ::-1], order]

    def _passage_rows(self, shape: tuple[int, ...]) -> Numbers:
        tokens = self._tokens((self.count, 1, *shape, self.length))
        return np.concatenate([tokens, np.ones_like(tokens), np.zeros_like(tokens)], axis=1)

    def _hdf5(self, parts: Callable[[], dict[str, Numbers]]) -> None:
        for number in range(self.files):
            with h5py.File(self.folder / f"data-{number}.h5", "w") as file:
                file.attrs["n_examples"] = self.count
                for name, data in parts().items():
                    file[name] = data if data.dtype == object else data.astype(np.int32)

    def _parameters(self, parameters: Section) -> None:
        (self.folder / "data_params.json").write_text(json.dumps(parameters))

    # --- Texts --------------------------------------------------------------------------------------------------------
    def masked_texts(self) -> None:
        """Rows for the masked language model with masks made before or while reading, and for questions."""
        count = self.section.get("max_predictions_per_seq", self.predictions)
        self._tables(
            {
                "tokens": ["[CLS]", *self._words(self.length - 2), "[SEP]"],
                "segment_ids": [0] * self.length,
                "is_random_next": number % 2,
                "input_ids": self._tokens((self.length,)).tolist(),
                "attention_mask": [1] * self.length,
                "input_mask": [1] * self.length,
                "token_type_ids": [0] * self.length,
                "masked_lm_positions": self.random.permutation(self.length)[:count].tolist(),
                "masked_lm_weights": [1] * count,
                "labels": self._tokens((count,)).tolist(),
                "next_sentence_label": number % 2,
                "start_position": number % self.length,
                "end_position": number % self.length,
            }
            for number in range(self.count)
        )

    def summaries(self) -> None:
        sentences = list(range(0, self.length, self.length // self.section.get("max_cls_tokens", self.predictions)))
        self._tables(
            {
                "input_token_ids": self._tokens((self.length,)).tolist(),
                "labels": self.random.integers(0, 2, len(sentences)).tolist(),
                "segment_ids": [0] * self.length,
                "cls_indices": sentences,
            }
            for _ in range(self.count)
        )

    def entities(self) -> None:
        self._tables(
            {"tokens": " ".join(self._words(self.length)), "labels": " ".join(self.random.choice(_LABELS, self.length))}
            for _ in range(self.count)
        )

    def sentences(self) -> None:
        """GLUE's tables: a text with a label, or a pair of texts with a relation."""
        relations = ("entailment", "neutral", "contradiction")
        rows = [
            {
                "sentence": self._line(),
                "label": number % 2,
                "sentence1": self._line(),
                "sentence2": self._line(),
                "gold_label": relations[number % len(relations)],
            }
            for number in range(self.count)
        ]
        for name in ("train", "dev", "dev_matched", "dev_mismatched"):
            self._table(self.folder / f"{name}.tsv", rows, "\t")

    def lines(self) -> None:
        self._listed(lambda path: path.write_text("".join(f"{self._line()}\n" for _ in range(self.count))))

    def translations(self) -> None:
        self.lines()
        paths = [self.folder.absolute() / f"samples-{number}" for number in range(self.files)]
        (self.folder / "meta.dat").write_text("".join(f"{path} {path} {self.count}\n" for path in paths))

    def _tables(self, rows: Iterable[Section]) -> None:
        found = list(rows)
        self._listed(lambda path: self._table(path, found, ","))

    def _listed(self, write: Callable[[Path], object]) -> None:
        for number in range(self.files):
            write(self.folder / f"samples-{number}")
        (self.folder / "meta.dat").write_text(
            "".join(f"samples-{number} {self.count}\n" for number in range(self.files))
        )

    def _table(self, path: Path, rows: Sequence[Section], delimiter: str) -> None:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)

    # --- Images -------------------------------------------------------------------------------------------------------
    def digits(self) -> None:
        folder = self.folder / "MNIST/raw"
        folder.mkdir(parents=True)
        for split in ("train", "t10k"):
            pixels = self.random.integers(0, 256, (self.count, 28, 28), dtype=np.uint8)
            labels = self.random.integers(0, 10, self.count, dtype=np.uint8)
            (folder / f"{split}-images-idx3-ubyte").write_bytes(
                struct.pack(">4i", 2051, *pixels.shape) + pixels.tobytes()
            )
            (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, self.count) + labels.tobytes())

    def classes(self) -> None:
        names = ("n00000000", "n00000001")
        torch.save(({name: (name,) for name in names}, []), self.folder / "meta.bin")
        for split in SPLITS:
            for name in names:
                self._pictures(self.folder / split / name, (PICTURE_SIDE, PICTURE_SIDE, 3), "JPEG")

    def latents(self) -> None:
        channels, sides = (next(values(self.configuration, name)) for name in ("latent_channels", "latent_size"))
        shape = (2 * channels, *sides)
        for split in SPLITS:
            folder = self.folder / split / "n00000000"
            folder.mkdir(parents=True)
            for number in range(self.count):
                latent = self.random.standard_normal(shape, dtype=np.float32)
                np.savez(folder / f"{number}.npz", vae_output=latent, label=np.array(0))

    def streets(self) -> None:
        for split in SPLITS:
            images, masks = (self.folder / kind / split / "town" for kind in ("leftImg8bit", "gtFine"))
            self._pictures(images, self.section["image_shape"], "png", "town_{}_leftImg8bit")
            self._pictures(masks, self.section["image_shape"][:2], "png", "town_{}_gtFine_labelIds", values=34)

    def roofs(self) -> None:
        for split in SPLITS:
            self._pictures(self.folder / split / "images", (*self.section["image_shape"][:2], 3), "png")
            self._pictures(self.folder / split / "gt", self.section["image_shape"][:2], "png", values=2)

    def defects(self) -> None:
        self._pictures(self.folder / "train_images", (256, 1600, 3), "jpg")
        rows = [
            {"ImageId": f"{number}.jpg", "ClassId": self.section["class_id"], "EncodedPixels": f"{number + 1} 99"}
            for number in range(self.count)
        ]
        self._table(self.folder / "train.csv", rows, ",")

    def volumes(self) -> None:
        depth, *area = self.section["image_shape"]
        names = [f"{number}.h5" for number in range(self.count // 4)]
        for part in ("image_files", "annotations/v1.0.0"):
            (self.folder / part).mkdir(parents=True)
        for split in SPLITS:
            text = json.dumps({"images": [{"file_name": name} for name in names]})
            (self.folder / "annotations/v1.0.0" / f"{split}.json").write_text(text)
        for name in names:
            with h5py.File(self.folder / "image_files" / name, "w") as file:
                for echo in ("echo1", "echo2"):
                    file[echo] = self.random.integers(0, 1000, (*area, depth), dtype=np.int16)
                file["seg"] = self.random.integers(0, 2, (*area, depth, 6), dtype=np.uint8)

    def _pictures(self, folder: Path, shape: Sequence[int], suffix: str, name: str = "{}", values: int = 256) -> None:
        folder.mkdir(parents=True)
        for number in range(self.count):
            pixels = self.random.integers(0, values, shape, dtype=np.uint8)
            Image.fromarray(pixels.squeeze()).save(folder / f"{name.format(number)}.{suffix}")

    # --- What all have ------------------------------------------------------------------------------------------------
    def _tokens(self, shape: tuple[int, ...]) -> Numbers:
        return self.random.integers(0, self.vocabulary, shape)

    def _words(self, count: int) -> list[str]:
        return [str(word) for word in self.random.choice(self.words[len(_SPECIAL_TOKENS) :], count)]

    def _line(self) -> str:
        return " ".join(self._words(self.length // 4))


# What the files of a data processor are, by its name; the first pattern that its beginning fits counts.
_WRITERS: tuple[tuple[str, Callable[[Samples], None]], ...] = (
    ("Gpt", Samples.language),
    ("Dpo", Samples.preferences),
    ("DPR", Samples.passages),
    ("Llava", Samples.images_with_texts),
    ("MultimodalSimple", Samples.images_in_texts),
    ("BertHDF5", Samples.masked_tokens),
    ("BertCSV|BertQA", Samples.masked_texts),
    ("BertSum", Samples.summaries),
    ("BertToken", Samples.entities),
    ("SST2|MNLI", Samples.sentences),
    ("T5Dynamic", Samples.lines),
    ("Transformer", Samples.translations),
    ("ImageNet|Dino", Samples.classes),
    ("DiffusionLatent", Samples.latents),
    ("Cityscapes", Samples.streets),
    ("Inria", Samples.roofs),
    ("Severstal", Samples.defects),
    ("Skm", Samples.volumes),
    ("$|MNIST", Samples.digits),
)
