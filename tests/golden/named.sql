WITH RECURSIVE pending(endpoint_id, queue, created_at) AS (
    (
        SELECT todos.endpoint_id AS endpoint_id, todos.queue AS queue, todos.created_at AS created_at
        FROM todos
        WHERE todos.state = 'pending'
        ORDER BY todos.endpoint_id, todos.queue, todos.created_at
        LIMIT 1
    )
    UNION ALL
    SELECT step.endpoint_id AS endpoint_id, step.queue AS queue, step.created_at AS created_at
    FROM pending
    JOIN LATERAL (
        SELECT todos.endpoint_id AS endpoint_id, todos.queue AS queue, todos.created_at AS created_at
        FROM todos
        WHERE todos.state = 'pending'
            AND (todos.endpoint_id, todos.queue) > (pending.endpoint_id, pending.queue)
        ORDER BY todos.endpoint_id, todos.queue, todos.created_at
        LIMIT 1
    ) AS step ON true
),
pairs AS MATERIALIZED (
    SELECT coalesce(pending.endpoint_id, queue_stalls.endpoint_id) AS endpoint_id,
        coalesce(pending.queue, queue_stalls.queue) AS queue, pending.created_at AS oldest,
        queue_stalls.nudges AS nudges, queue_stalls.last_nudged_at AS last_nudged_at,
        queue_stalls.last_claim_at AS last_claim_at
    FROM pending
    FULL OUTER JOIN queue_stalls ON queue_stalls.endpoint_id = pending.endpoint_id
        AND queue_stalls.queue = pending.queue
),
emptied AS (
    SELECT unchanged.endpoint_id AS endpoint_id, unchanged.queue AS queue
    FROM pairs
    JOIN LATERAL (
        SELECT queue_stalls.endpoint_id AS endpoint_id, queue_stalls.queue AS queue
        FROM queue_stalls
        WHERE queue_stalls.endpoint_id = pairs.endpoint_id
            AND queue_stalls.queue = pairs.queue
            AND queue_stalls.nudges = pairs.nudges
            AND queue_stalls.last_nudged_at = pairs.last_nudged_at
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) AS unchanged ON true
    WHERE pairs.oldest IS NULL
),
drained AS (
    DELETE FROM queue_stalls
    USING emptied
    WHERE queue_stalls.endpoint_id = emptied.endpoint_id AND queue_stalls.queue = emptied.queue
    RETURNING queue_stalls.endpoint_id, queue_stalls.queue
),
due AS MATERIALIZED (
    SELECT stalled.endpoint_id AS endpoint_id, stalled.queue AS queue, stalled.claimed_at AS claimed_at,
        stalled.spent AS spent, stalled.since AS since, stalled.stalled_since AS stalled_since,
        representative.id AS todo_id
    FROM (
        SELECT known.endpoint_id AS endpoint_id, known.queue AS queue, known.claimed_at AS claimed_at,
            known.spent AS spent,
            CASE
                WHEN (known.spent > 0) THEN known.last_nudged_at
                ELSE greatest(
                    greatest(known.oldest, known.claimed_at), known.last_nudged_at, requeue.updated_at
                )
            END AS since,
            greatest(greatest(known.oldest, known.claimed_at), requeue.updated_at) AS stalled_since
        FROM (
            SELECT pairs.endpoint_id AS endpoint_id, pairs.queue AS queue, pairs.oldest AS oldest,
                pairs.nudges AS nudges, pairs.last_nudged_at AS last_nudged_at,
                pairs.last_claim_at AS last_claim_at, claim.claimed_at AS claimed_at,
                CASE
                    WHEN (
                        pairs.nudges IS NULL
                        OR claim.claimed_at IS NOT NULL
                        AND (pairs.last_claim_at IS NULL OR claim.claimed_at > pairs.last_claim_at)
                    ) THEN 0
                    ELSE pairs.nudges
                END AS spent
            FROM pairs
            LEFT OUTER JOIN LATERAL (
                SELECT todos.claimed_at AS claimed_at
                FROM todos
                WHERE todos.endpoint_id = pairs.endpoint_id
                    AND todos.queue = pairs.queue
                    AND todos.claimed_at IS NOT NULL
                ORDER BY todos.claimed_at DESC
                LIMIT 1
            ) AS claim ON true
            WHERE statement_timestamp() - pairs.oldest >= interval '300 seconds'
                AND (
                    pairs.last_nudged_at IS NULL
                    OR statement_timestamp() - pairs.last_nudged_at >= interval '300 seconds'
                )
        ) AS known
        LEFT OUTER JOIN LATERAL (
            SELECT todos.updated_at AS updated_at
            FROM todos
            WHERE (
                SELECT todos.updated_at
                FROM todos
                WHERE todos.state = 'pending' AND todos.updated_at > todos.created_at
                ORDER BY todos.endpoint_id, todos.queue, todos.updated_at
                LIMIT 1
            ) IS NOT NULL
                AND todos.endpoint_id = known.endpoint_id
                AND todos.queue = known.queue
                AND todos.state = 'pending'
                AND todos.updated_at > todos.created_at
            ORDER BY todos.updated_at DESC
            LIMIT 1
        ) AS requeue ON true
        WHERE known.spent < 5
            AND statement_timestamp() - CASE
                WHEN (known.spent > 0) THEN known.last_nudged_at
                ELSE greatest(greatest(known.oldest, known.claimed_at), known.last_nudged_at)
            END >= CASE
                WHEN (known.spent = 0) THEN interval '300 seconds'
                WHEN (known.spent = 1) THEN interval '1200 seconds'
                WHEN (known.spent = 2) THEN interval '3600 seconds'
                WHEN (known.spent = 3) THEN interval '21600 seconds'
                WHEN (known.spent = 4) THEN interval '21600 seconds'
            END
            AND (
                requeue.updated_at IS NULL
                OR statement_timestamp() - requeue.updated_at >= interval '300 seconds'
            )
        ORDER BY known.spent, since, known.endpoint_id, known.queue
    ) AS stalled
    JOIN LATERAL (
        SELECT todos.id AS id
        FROM todos
        WHERE todos.endpoint_id = stalled.endpoint_id
            AND todos.queue = stalled.queue
            AND todos.state = 'pending'
            AND todos.vouched
        ORDER BY todos.created_at, todos.id
        LIMIT 1
    ) AS representative ON true
    JOIN LATERAL (
        SELECT notify_hooks.id AS id
        FROM notify_hooks
        JOIN endpoints ON endpoints.id = notify_hooks.endpoint_id
        WHERE endpoints.id = stalled.endpoint_id
            AND endpoints.state = 'active'
            AND (endpoints.expires_at IS NULL OR endpoints.expires_at > statement_timestamp())
            AND stalled.queue = any(endpoints.scope_queues)
            AND stalled.queue != 'quarantine'
            AND notify_hooks.endpoint_id = stalled.endpoint_id
            AND notify_hooks.enabled
            AND (cardinality(notify_hooks.queues) = 0 OR stalled.queue = any(notify_hooks.queues))
        LIMIT 1
    ) AS hook ON true
    ORDER BY stalled.spent, stalled.since, stalled.endpoint_id, stalled.queue
    LIMIT 4
),
charged AS (
    INSERT INTO queue_stalls (endpoint_id, queue, nudges, last_nudged_at, last_claim_at)
    SELECT standing.endpoint_id AS endpoint_id, standing.queue AS queue, 1,
        statement_timestamp() AS statement_timestamp_1, standing.claimed_at AS claimed_at
    FROM (
        SELECT due.endpoint_id AS endpoint_id, due.queue AS queue, due.claimed_at AS claimed_at
        FROM due
        JOIN LATERAL (
            SELECT endpoints.id AS id
            FROM endpoints
            WHERE endpoints.id = due.endpoint_id
            LIMIT 1 FOR KEY SHARE SKIP LOCKED
        ) AS held ON true
    ) AS standing
    ORDER BY standing.endpoint_id, standing.queue
    ON CONFLICT (endpoint_id, queue)
    DO UPDATE SET nudges = (
        CASE
            WHEN (
                excluded.last_claim_at IS NOT NULL
                AND (
                    queue_stalls.last_claim_at IS NULL OR excluded.last_claim_at > queue_stalls.last_claim_at
                )
            ) THEN 0
            ELSE queue_stalls.nudges
        END + 1
    ),
        last_nudged_at = excluded.last_nudged_at, last_claim_at = excluded.last_claim_at
    WHERE CASE
        WHEN (
            excluded.last_claim_at IS NOT NULL
            AND (queue_stalls.last_claim_at IS NULL OR excluded.last_claim_at > queue_stalls.last_claim_at)
        ) THEN 0
        ELSE queue_stalls.nudges
    END < 5
        AND excluded.last_nudged_at - queue_stalls.last_nudged_at >= CASE
            WHEN (
                excluded.last_claim_at IS NOT NULL
                AND (
                    queue_stalls.last_claim_at IS NULL OR excluded.last_claim_at > queue_stalls.last_claim_at
                )
            ) THEN interval '300 seconds'
            ELSE CASE
                WHEN (queue_stalls.nudges = 0) THEN interval '300 seconds'
                WHEN (queue_stalls.nudges = 1) THEN interval '1200 seconds'
                WHEN (queue_stalls.nudges = 2) THEN interval '3600 seconds'
                WHEN (queue_stalls.nudges = 3) THEN interval '21600 seconds'
                WHEN (queue_stalls.nudges = 4) THEN interval '21600 seconds'
            END
        END
    RETURNING queue_stalls.endpoint_id, queue_stalls.queue, queue_stalls.nudges, queue_stalls.last_nudged_at,
        queue_stalls.last_claim_at
)
SELECT todos.id, todos.endpoint_id, todos.queue, todos.source, todos.kind, todos.title, todos.payload,
    todos.idempotency_key, todos.assignee, todos.state, todos.owner, todos.lease_expires_at, todos.attempt,
    todos.max_attempts, todos.result, todos.next_retry_at, todos.last_ringed_at, todos.ring_attempts,
    todos.created_at, todos.updated_at, todos.claimed_at, todos.completed_at, todos.vouched,
    charged.nudges AS number, charged.last_nudged_at AS nudged_at, due.stalled_since
FROM charged
JOIN due ON charged.endpoint_id = due.endpoint_id AND charged.queue = due.queue
JOIN todos ON todos.endpoint_id = due.endpoint_id AND todos.id = due.todo_id
ORDER BY due.spent, due.since, due.endpoint_id, due.queue;
