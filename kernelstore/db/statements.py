"""The literal SQL of the compiling and loading room.

What a hit reads are revision-0001 columns only, so that older files serve as layers.
"""

from __future__ import annotations

__all__ = [
    "ADD_TO_COUNTER",
    "ARTIFACTS_OF_PROGRAM",
    "ARTIFACT_WITH_KEY",
    "BEAT_CLAIM",
    "BLOB_OF_KEY",
    "CLAIMS",
    "CLAIM_WITH_KEY",
    "COUNT_ARTIFACTS",
    "DELETE_ARTIFACT",
    "DELETE_DAMAGED",
    "DELETE_PROGRAM_IF_UNUSED",
    "DELETE_WITHOUT_BLOB",
    "DROP_CLAIM",
    "DROP_OLD_HEADERS",
    "DROP_OLD_SCANS",
    "END_CLAIM",
    "HEADERS_OF_PATHS",
    "INSERT_ARTIFACT",
    "INSERT_BLOB",
    "INSERT_PROGRAM",
    "INSERT_SYMBOL",
    "KEYS_AFTER",
    "MIN_WRITER",
    "NEWEST_PROGRAMS",
    "PROGRAMS_WITH_NAME",
    "PROGRAMS_WITH_PREFIX",
    "PROGRAM_COLUMNS",
    "PROGRAM_ID",
    "PROGRAM_WITH_ID",
    "PROGRAM_WITH_KEY",
    "REMEMBER_HEADER",
    "REMEMBER_SCAN",
    "REMEMBER_TOOLCHAIN",
    "REVISION",
    "SCAN_WITH_KEY",
    "SYMBOLS_OF_ARTIFACT",
    "TAKE_CLAIM",
    "TOOLCHAIN_OF_LIBRARY",
    "TOUCH",
]

# The schema revision this release reads and writes: `PRAGMA user_version`, and alembic's head as a number.
REVISION = 2

MIN_WRITER = "SELECT value FROM meta WHERE key = 'min_writer'"

# Text comes as bytes: damage may have made it no UTF-8, and the checksum is over bytes.
# Through the covering index of `key` to the one row of `blob`: no page of `artifact` itself is read.
BLOB_OF_KEY = """
SELECT blob.artifact_id, CAST(blob.codec AS BLOB), blob.size_bytes, blob.checksum, CAST(blob.header AS BLOB), blob.data
FROM artifact JOIN blob ON blob.artifact_id = artifact.id
WHERE artifact.key = :key
"""

# In the order of ArtifactInfo's fields, the newest first. A program has few artifacts.
ARTIFACTS_OF_PROGRAM = """
SELECT
    artifact.key, artifact.kind, artifact.arch, artifact.toolchain, artifact.driver_version,
    artifact.ptx_version, artifact.origin, artifact.relocatable, artifact.size_bytes, artifact.stored_size_bytes,
    artifact.payload_sha256, artifact.compile_ms, artifact.created_at_ns, artifact.last_access_ns, artifact.usage_count,
    artifact.pinned, program.key, program.name
FROM program JOIN artifact ON artifact.program_id = program.id
WHERE program.key = :key ORDER BY artifact.id DESC LIMIT :limit
"""

SYMBOLS_OF_ARTIFACT = """
SELECT
    lowered_name, name_expression, what, parameters, registers, shared_bytes, local_bytes, stack_bytes, constant_bytes,
    spill_store_bytes, spill_load_bytes
FROM artifact JOIN symbol ON symbol.artifact_id = artifact.id
WHERE artifact.key = :key ORDER BY symbol.id
"""

COUNT_ARTIFACTS = "SELECT count(*) FROM artifact"

# An artifact without a blob is what a lost page leaves.
DELETE_WITHOUT_BLOB = """
DELETE FROM artifact WHERE key = :key AND NOT EXISTS (SELECT 1 FROM blob WHERE blob.artifact_id = artifact.id)
RETURNING id
"""

KEYS_AFTER = "SELECT id, key FROM artifact WHERE id > :id ORDER BY id LIMIT :limit"

PROGRAM_ID = "SELECT id FROM program WHERE key = :key"

INSERT_PROGRAM = """
INSERT INTO program (
    key, name, source, source_codec, source_size_bytes, source_sha256, options, name_expressions, part_digests,
    dependencies, dependencies_size_bytes, created_at_ns
) VALUES (
    :key, :name, :source, :source_codec, :source_size_bytes, :source_sha256, :options, :name_expressions,
    :part_digests, :dependencies, :dependencies_size_bytes, :created_at_ns
) RETURNING id
"""

# Equal keys mean equal inputs, so the first row stays: no row is returned for the second.
INSERT_ARTIFACT = """
INSERT INTO artifact (
    key, program_id, kind, arch, arch_major, arch_minor, arch_suffix, toolchain, toolchain_major, toolchain_minor,
    toolchain_build, driver_version, ptx_version, origin, relocatable, size_bytes, stored_size_bytes, payload_sha256,
    compile_ms, created_at_ns, last_access_ns, usage_count, rank, pinned
) VALUES (
    :key, :program_id, :kind, :arch, :arch_major, :arch_minor, :arch_suffix, :toolchain, :toolchain_major,
    :toolchain_minor, :toolchain_build, :driver_version, :ptx_version, :origin, :relocatable, :size_bytes,
    :stored_size_bytes, :payload_sha256, :compile_ms, :created_at_ns, :created_at_ns, 0, :created_at_ns, 0
) ON CONFLICT (key) DO NOTHING RETURNING id
"""

INSERT_BLOB = """
INSERT INTO blob (artifact_id, codec, size_bytes, checksum, header, data)
VALUES (:artifact_id, :codec, :size_bytes, :checksum, :header, :data)
"""

INSERT_SYMBOL = """
INSERT INTO symbol (
    artifact_id, lowered_name, name_expression, what, parameters, registers, shared_bytes, local_bytes, stack_bytes,
    constant_bytes, spill_store_bytes, spill_load_bytes
) VALUES (
    :artifact_id, :lowered_name, :name_expression, :what, :parameters, :registers, :shared_bytes, :local_bytes,
    :stack_bytes, :constant_bytes, :spill_store_bytes, :spill_load_bytes
)
"""

DELETE_ARTIFACT = "DELETE FROM artifact WHERE key = :key RETURNING program_id"

# By id and checksum: a row that somebody repaired meanwhile has another checksum and stays.
DELETE_DAMAGED = """
DELETE FROM artifact WHERE id = (SELECT artifact_id FROM blob WHERE artifact_id = :artifact_id AND checksum = :checksum)
RETURNING program_id
"""

DELETE_PROGRAM_IF_UNUSED = """
DELETE FROM program WHERE id = :id AND NOT EXISTS (SELECT 1 FROM artifact WHERE program_id = :id)
"""

# By key, never by id: a row that was deleted meanwhile takes its uses with it.
TOUCH = """
UPDATE artifact SET
    usage_count = usage_count + :uses,
    last_access_ns = max(last_access_ns, :last_access_ns),
    rank = max(last_access_ns, :last_access_ns)
WHERE key = :key
"""

ADD_TO_COUNTER = """
INSERT INTO counter (day, name, reason, value) VALUES (:day, :name, :reason, :value)
ON CONFLICT (day, name, reason) DO UPDATE SET value = value + excluded.value
"""

TOOLCHAIN_OF_LIBRARY = "SELECT build FROM toolchain_memo WHERE path = :path AND signature = :signature"

REMEMBER_TOOLCHAIN = """
INSERT INTO toolchain_memo (path, signature, build, created_at_ns) VALUES (:path, :signature, :build, :created_at_ns)
ON CONFLICT (path) DO UPDATE SET
    signature = excluded.signature, build = excluded.build, created_at_ns = excluded.created_at_ns
"""

# -- programs: what is rebuilt, loaded or compared by what is stored of it --

PROGRAM_COLUMNS = (
    "key",
    "name",
    "source",
    "source_codec",
    "source_size_bytes",
    "options",
    "name_expressions",
    "part_digests",
    "dependencies",
    "dependencies_size_bytes",
)

PROGRAM_WITH_KEY = """
SELECT key, name, source, source_codec, source_size_bytes, options, name_expressions, part_digests, dependencies,
    dependencies_size_bytes
FROM program WHERE key = :key
"""

PROGRAM_WITH_ID = """
SELECT key, name, source, source_codec, source_size_bytes, options, name_expressions, part_digests, dependencies,
    dependencies_size_bytes
FROM program WHERE id = :id
"""

# The index on `name` ends with the row id, so both are read in order, without a sort.
PROGRAMS_WITH_NAME = """
SELECT id, key, name, part_digests, source_size_bytes FROM program WHERE name = :name ORDER BY id DESC LIMIT :limit
"""

NEWEST_PROGRAMS = """
SELECT id, key, name, part_digests, source_size_bytes FROM program ORDER BY id DESC LIMIT :limit
"""

# A program's own key or one of its artifacts'; both through the indexes of the keys.
PROGRAMS_WITH_PREFIX = """
SELECT key FROM (SELECT key FROM program WHERE key BETWEEN :low AND :high LIMIT :limit)
UNION
SELECT key FROM (
    SELECT DISTINCT program.key FROM artifact JOIN program ON program.id = artifact.program_id
    WHERE artifact.key BETWEEN :low AND :high LIMIT :limit
)
"""

ARTIFACT_WITH_KEY = """
SELECT artifact.kind, artifact.arch, artifact.toolchain, program.key
FROM artifact LEFT JOIN program ON program.id = artifact.program_id
WHERE artifact.key = :key
"""

# One statement for all headers of a level, each through the primary key.
HEADERS_OF_PATHS = """
SELECT path, device, inode, size_bytes, mtime_ns, ctime_ns, digest, includes, last_access_ns
FROM header WHERE path IN (SELECT value FROM json_each(:paths))
"""

REMEMBER_HEADER = """
INSERT INTO header (path, device, inode, size_bytes, mtime_ns, ctime_ns, digest, includes, last_access_ns)
VALUES (:path, :device, :inode, :size_bytes, :mtime_ns, :ctime_ns, :digest, :includes, :last_access_ns)
ON CONFLICT (path) DO UPDATE SET
    device = excluded.device, inode = excluded.inode, size_bytes = excluded.size_bytes, mtime_ns = excluded.mtime_ns,
    ctime_ns = excluded.ctime_ns, digest = excluded.digest, includes = excluded.includes,
    last_access_ns = excluded.last_access_ns
"""

DROP_OLD_HEADERS = """
DELETE FROM header WHERE path IN (SELECT path FROM header ORDER BY last_access_ns DESC LIMIT -1 OFFSET :limit)
"""

SCAN_WITH_KEY = "SELECT found, found_codec, found_size_bytes, last_access_ns FROM scan WHERE key = :key"

REMEMBER_SCAN = """
INSERT INTO scan (key, found, found_codec, found_size_bytes, last_access_ns)
VALUES (:key, :found, :found_codec, :found_size_bytes, :last_access_ns)
ON CONFLICT (key) DO UPDATE SET
    found = excluded.found, found_codec = excluded.found_codec, found_size_bytes = excluded.found_size_bytes,
    last_access_ns = excluded.last_access_ns
"""

DROP_OLD_SCANS = """
DELETE FROM scan WHERE key IN (SELECT key FROM scan ORDER BY last_access_ns DESC LIMIT -1 OFFSET :limit)
"""

# -- claims: who is compiling what --

CLAIM_WITH_KEY = """
SELECT state, nonce, beat, owner, log, host, boot, pid_namespace, pid, process_start FROM claim WHERE key = :key
"""

TAKE_CLAIM = """
INSERT INTO claim (
    key, state, nonce, owner, host, boot, pid_namespace, pid, process_start, beat, claimed_at_ns, log
) VALUES (
    :key, 'running', :nonce, :owner, :host, :boot, :pid_namespace, :pid, :process_start, 0, :claimed_at_ns, NULL
) ON CONFLICT (key) DO UPDATE SET
    state = excluded.state, nonce = excluded.nonce, owner = excluded.owner, host = excluded.host, boot = excluded.boot,
    pid_namespace = excluded.pid_namespace, pid = excluded.pid, process_start = excluded.process_start,
    beat = excluded.beat, claimed_at_ns = excluded.claimed_at_ns, log = excluded.log
"""

BEAT_CLAIM = "UPDATE claim SET beat = beat + 1 WHERE key = :key AND nonce = :nonce RETURNING beat"

# Only the owner's own: another one may have taken over.
DROP_CLAIM = "DELETE FROM claim WHERE key = :key AND nonce = :nonce"

END_CLAIM = "UPDATE claim SET state = :state, log = :log WHERE key = :key AND nonce = :nonce"

CLAIMS = "SELECT key, nonce, state, claimed_at_ns, host, boot, pid_namespace, pid, process_start FROM claim"
