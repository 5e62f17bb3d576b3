"""The base tables of the wake chain: endpoints, todos, notify_hooks.

Revision: 0001, the first.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql as pg

from switchboard_stall import migrations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

metadata = sa.MetaData()
"""The tables this revision makes, frozen: it must not follow the models."""


def _timestamp(name: str, **kw: object) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), **kw)  # type: ignore[arg-type]


sa.Table(
    "endpoints",
    metadata,
    sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
    sa.Column("slug", sa.Text(), nullable=False),
    sa.Column("scope_queues", pg.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
    sa.Column("state", sa.Text(), server_default="active", nullable=False),
    _timestamp("expires_at"),
    _timestamp("created_at", server_default=sa.text("now()"), nullable=False),
    _timestamp("revoked_at"),
    sa.Column("default_lease_ttl_seconds", sa.Integer()),
    sa.PrimaryKeyConstraint("id", name="pk_endpoints"),
    sa.UniqueConstraint("slug", name="uq_endpoints_slug"),
    sa.CheckConstraint("state IN ('active', 'revoked')", name="ck_endpoints_state"),
    sa.CheckConstraint(
        "default_lease_ttl_seconds IS NULL OR default_lease_ttl_seconds BETWEEN 60 AND 86400",
        name="ck_endpoints_default_lease_ttl_seconds",
    ),
    sa.Index(
        "ix_endpoints_expires_at",
        "expires_at",
        postgresql_where=sa.text("state = 'active' AND expires_at IS NOT NULL"),
    ),
)

sa.Table(
    "todos",
    metadata,
    sa.Column("id", sa.Text(), nullable=False),
    sa.Column("endpoint_id", sa.Uuid(), nullable=False),
    sa.Column("queue", sa.Text(), nullable=False),
    sa.Column("source", sa.Text()),
    sa.Column("kind", sa.Text()),
    sa.Column("title", sa.Text(), nullable=False),
    sa.Column("payload", pg.JSONB()),
    sa.Column("idempotency_key", sa.Text()),
    sa.Column("assignee", sa.Text()),
    sa.Column("state", sa.Text(), server_default="pending", nullable=False),
    sa.Column("owner", sa.Text()),
    _timestamp("lease_expires_at"),
    sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
    sa.Column("max_attempts", sa.Integer(), server_default="5", nullable=False),
    sa.Column("result", pg.JSONB()),
    _timestamp("next_retry_at"),
    _timestamp("last_ringed_at"),
    sa.Column("ring_attempts", sa.Integer(), server_default="0", nullable=False),
    _timestamp("created_at", server_default=sa.text("now()"), nullable=False),
    _timestamp("updated_at", server_default=sa.text("now()"), nullable=False),
    _timestamp("claimed_at"),
    _timestamp("completed_at"),
    sa.Column(
        "vouched",
        sa.Boolean(),
        server_default=sa.text("false"),
        nullable=False,
        info={
            # In an existing database the gate lives one table away.
            "then": (
                "UPDATE todos SET vouched = true FROM events",
                "WHERE events.id = todos.event_id AND (events.verified OR events.trust_mode = 'token');",
                "and whoever inserts todos must set it from now on",
            )
        },
    ),
    sa.PrimaryKeyConstraint("id", name="pk_todos"),
    sa.ForeignKeyConstraint(
        ["endpoint_id"], ["endpoints.id"], name="fk_todos_endpoint_id_endpoints", ondelete="CASCADE"
    ),
    sa.CheckConstraint(
        "state IN ('pending', 'claimed', 'done', 'failed', 'canceled', 'rejected', 'input-required', "
        "'auth-required')",
        name="ck_todos_state",
    ),
    sa.Index(
        "ix_todos_pending",
        "endpoint_id",
        "queue",
        "created_at",
        postgresql_where=sa.text("state = 'pending'"),
    ),
    sa.Index("ix_todos_endpoint_id_created_at", "endpoint_id", sa.text("created_at DESC")),
    sa.Index(
        "ix_todos_ring",
        sa.text("last_ringed_at ASC NULLS FIRST"),
        "created_at",
        postgresql_where=sa.text("state = 'pending'"),
    ),
    sa.Index(
        "ix_todos_retry",
        "next_retry_at",
        postgresql_where=sa.text("state = 'failed' AND next_retry_at IS NOT NULL"),
    ),
    sa.Index(
        "uq_todos_idempotency_key",
        "endpoint_id",
        "idempotency_key",
        unique=True,
        postgresql_where=sa.text(
            "idempotency_key IS NOT NULL AND state != 'done' "
            "AND (state != 'failed' OR next_retry_at IS NOT NULL)"
        ),
    ),
)

sa.Table(
    "notify_hooks",
    metadata,
    sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
    sa.Column("endpoint_id", sa.Uuid(), nullable=False),
    sa.Column("url", sa.Text(), nullable=False),
    sa.Column("secret", sa.Text(), nullable=False),
    sa.Column("prev_secret", sa.Text()),
    _timestamp("prev_secret_expires_at"),
    sa.Column("queues", pg.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
    sa.Column("ignore_presence", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    sa.Column("enabled", sa.Boolean(), server_default=sa.text("true"), nullable=False),
    sa.Column("disabled_reason", sa.Text()),
    _timestamp("disabled_at"),
    sa.Column("consecutive_failures", sa.Integer(), server_default="0", nullable=False),
    _timestamp("last_attempt_at"),
    sa.Column("last_status", sa.Integer()),
    sa.Column("last_error", sa.Text()),
    _timestamp("created_at", server_default=sa.text("now()"), nullable=False),
    _timestamp("rotated_at"),
    sa.PrimaryKeyConstraint("id", name="pk_notify_hooks"),
    sa.ForeignKeyConstraint(
        ["endpoint_id"], ["endpoints.id"], name="fk_notify_hooks_endpoint_id_endpoints", ondelete="CASCADE"
    ),
    sa.CheckConstraint("length(url) <= 2048", name="ck_notify_hooks_url"),
    sa.CheckConstraint(
        "disabled_reason IS NULL OR disabled_reason IN ('consecutive_failures', 'operator')",
        name="ck_notify_hooks_disabled_reason",
    ),
    sa.Index("ix_notify_hooks_endpoint_id", "endpoint_id", postgresql_where=sa.text("enabled")),
)


def upgrade() -> None:
    context = op.get_context()
    if not context.as_sql:
        migrations.refuse_unversioned(op.get_bind(), context.opts["stall_schema"], metadata, revision)
    metadata.create_all(op.get_bind(), checkfirst=False)


def downgrade() -> None:
    context = op.get_context()
    if not context.as_sql:
        migrations.refuse_foreign(op.get_bind(), context.opts["stall_schema"], metadata)
    metadata.drop_all(op.get_bind(), checkfirst=False)
