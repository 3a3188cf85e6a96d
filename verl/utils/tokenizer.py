"""Tokenizers and processors, ready for batching."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "*.tiktoken", "merges.txt", "spiece*", "tekken.json")


def load_tokenizer(path: str | None, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory, or of a model name that the local cache knows.

    A tokenizer without a padding token gets its end-of-text token as one. This is safe here because masks are made
    from lengths, never from token ids.

    Raises:
        ConfigError: no path, there is no tokenizer, or it has neither a padding nor an end-of-text token.
    """
    from transformers import AutoTokenizer

    if path is None:
        raise ConfigError("model.path is not set, so there is no tokenizer; give model.path or model.tokenizer_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    except (OSError, ValueError) as error:
        what = f"directory {path!r}" if Path(path).is_dir() else f"{path!r}, which is not a local directory,"
        raise ConfigError(f"cannot load a tokenizer from {what}: {error}") from error
    _require_vocabulary(tokenizer, path)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # Transformers makes an empty one where files are missing
        raise ConfigError(
            f"the tokenizer of {path!r} has no vocabulary; copy tokenizer.json and tokenizer_config.json beside the "
            "model, or give model.tokenizer_path"
        )
    set_pad_token(tokenizer)
    return tokenizer


def _require_vocabulary(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a directory without any file of a vocabulary: Transformers makes a tokenizer of special tokens alone.

    Raises:
        ConfigError: none of the files that the tokenizer reads is there.
    """
    directory, names = Path(path).expanduser(), set((tokenizer.vocab_files_names or {}).values())
    if not directory.is_dir() or not names or any((directory / name).is_file() for name in names):
        return
    if any(any(directory.glob(pattern)) for pattern in ("*.model", "*.tiktoken", "tekken.json", "vocab*", "*.gguf")):
        return
    raise ConfigError(
        f"the tokenizer of {path!r} has no vocabulary: none of {', '.join(sorted(names))} is there; copy "
        "tokenizer.json beside the model, or give model.tokenizer_path"
    )


def textless_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[int, ...]:
    """Numbers below ``size`` that are no token of the tokenizer, or one with an empty text.

    Models often have more rows in their embedding than the tokenizer has tokens, and a vocabulary may have holes. Added
    and special tokens have a text.

    Args:
        tokenizer: of the model.
        size: rows of the model's embedding.
    """
    ids = {number for text, number in tokenizer.get_vocab().items() if text}
    ids |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.content}
    return tuple(sorted(set(range(size)) - ids))


@lru_cache(maxsize=8)
def unsampled_tokens(
    path: str | None, tokenizer_path: str | None, trust_remote_code: bool, size: int
) -> tuple[int, ...]:
    """:func:`textless_tokens` of a model, which no engine samples; none where there is no tokenizer to ask.

    Args:
        path: the model's directory.
        tokenizer_path: where its tokenizer is; None: in the same directory.
        trust_remote_code: run code of the tokenizer.
        size: rows of the model's embedding.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    if tokenizer_path is None and not has_tokenizer(path):
        return ()
    found = textless_tokens(load_tokenizer(tokenizer_path or path, trust_remote_code), size)
    if found:
        logger.info("%d of %d tokens of %s have no text: they are never sampled", len(found), size, path)
    return found


def has_tokenizer(path: str | None) -> bool:
    """Whether a model directory has files of a tokenizer; a name that is no directory is taken to have some."""
    if path is None:
        return False
    directory = Path(path).expanduser()
    return not directory.is_dir() or any(any(directory.glob(pattern)) for pattern in _TOKENIZER_FILES)


def text_without_specials(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], keep: Collection[str] = ()) -> str:
    """The text of tokens as a reader gets it: without special tokens, but for those in ``keep``."""
    if keep:
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        hidden = special - {number for number, token in added.items() if token.content in keep}
        ids = [number for number in ids if number not in hidden]
    return str(tokenizer.decode(list(ids), skip_special_tokens=not keep))


def set_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without padding token its end-of-text token as one."""
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has neither a padding nor an end-of-text token; set pad_token in its tokenizer_config.json"
        )
    tokenizer.pad_token = tokenizer.eos_token
    logger.info("the tokenizer has no padding token; %r is used for padding", tokenizer.eos_token)


@dataclass(frozen=True)
class ImageTextProcessor:
    """What reading images takes of a processor, where Transformers' own cannot be made.

    Transformers makes the processor of a model that reads videos too only beside torchvision. Images need Pillow alone.

    Attributes:
        image_processor: makes patches of images.
        image_token_id: placeholder of an image in the text.
    """

    image_processor: Any
    image_token_id: int


def load_processor(path: str, trust_remote_code: bool = False, **kwargs: Any) -> Any | None:
    """The processor of a multi-modal model, or ``None`` for a text model."""
    from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # a directory of a processor alone
        config = None
    if config is not None and not set(config.sub_configs) - {"text_config"}:
        return None
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        logger.info("%s: no whole processor (%s)", path, error)
        return _image_text_processor(path, config, trust_remote_code)
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _image_text_processor(path: str, config: Any, trust_remote_code: bool) -> ImageTextProcessor | None:
    from transformers import AutoImageProcessor

    if getattr(config, "vision_config", None) is None or not hasattr(config, "image_token_id"):
        return None
    try:
        image_processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        logger.info("%s: no processor of images (%s)", path, error)
        return None
    return ImageTextProcessor(image_processor, int(config.image_token_id))


def hf_tokenizer(name_or_path: str, *, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase:
    """:func:`load_tokenizer` under the name that scripts of this ecosystem use."""
    return load_tokenizer(name_or_path, trust_remote_code, **kwargs)


def hf_processor(name_or_path: str, *, trust_remote_code: bool = False, **kwargs: Any) -> Any | None:
    """:func:`load_processor` under the name that scripts of this ecosystem use."""
    return load_processor(name_or_path, trust_remote_code, **kwargs)
