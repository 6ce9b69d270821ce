"""Settings that are fine alone and wrong beside another, or beside what is on this machine."""

from pathlib import Path

from tiercel.errors import ConfigError
from tiercel.options import Options, flag_name


def check_together(options: Options) -> None:
    """Values that are fine alone and wrong beside another."""
    block, budget = options.block_size, options.max_num_batched_tokens
    if block & (block - 1):
        raise ConfigError("config.value", f"--block-size {block}: expected a power of two from 1 to 256")
    if budget is not None and budget < block:
        raise conflict(f"--max-num-batched-tokens {budget} is below --block-size {block}: a step must hold one block")
    if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
        raise conflict("--ssl-keyfile and --ssl-certfile belong together: give both or none")
    _check_disk(options)
    if options.allow_credentials and "*" in options.allowed_origins:
        raise conflict("--allow-credentials needs --allowed-origins without *: every page could use a visitor's cookie")
    if options.root_path and not options.root_path.startswith("/"):
        raise conflict(f"--root-path {options.root_path}: expected a path that starts with /")
    for flag, keys in {"--api-key": options.api_key, "--admin-key": filter(None, (options.admin_key,))}.items():
        if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
            raise conflict(f"{flag} ***: expected printable ASCII without spaces, as it stands in an HTTP header")
    _check_files(options)


def _check_disk(options: Options) -> None:
    if not options.kv_disk_path:
        for name in ("kv_disk_size", "kv_disk_daily_writes"):
            if getattr(options, name) is not None:
                raise conflict(f"{flag_name(name)} needs --kv-disk-path: there is no folder to write to")
        return
    if not options.enable_prefix_caching:
        raise conflict("--kv-disk-path needs --enable-prefix-caching: blocks are found again by their content")
    folders = [Path(path).expanduser().resolve() for path in options.kv_disk_path]
    for path, folder in zip(options.kv_disk_path, folders, strict=True):
        if folder.exists() and not folder.is_dir():
            raise conflict(f"--kv-disk-path {path}: this is a file, a folder is needed")
        if folders.count(folder) > 1:
            raise conflict(f"--kv-disk-path {path}: the same folder twice")


def _check_files(options: Options) -> None:
    files = {"ssl_keyfile": options.ssl_keyfile, "ssl_certfile": options.ssl_certfile}
    files["tenants_config"] = options.tenants_config
    template = options.chat_template
    if template is not None and "{" not in template and "\n" not in template:  # else it is the template itself
        files["chat_template"] = template
    for name, path in files.items():
        if path is not None and not Path(path).is_file():
            raise conflict(f"{flag_name(name)} {path}: there is no such file")
    folders = {"tokenizer": options.tokenizer}
    if options.generation_config not in ("auto", "vllm", "tiercel"):
        folders["generation_config"] = options.generation_config
    for name, path in folders.items():
        if path is not None and not Path(path).is_dir():
            raise conflict(f"{flag_name(name)} {path}: there is no such folder")


def conflict(message: str) -> ConfigError:
    """The error of a value that is wrong beside another, or beside what is on this machine."""
    return ConfigError("config.conflict", message)
