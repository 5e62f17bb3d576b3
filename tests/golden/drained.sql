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
)
SELECT drained.endpoint_id, drained.queue
FROM drained;
