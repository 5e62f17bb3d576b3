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
)
SELECT pending.endpoint_id, pending.queue, pending.created_at
FROM pending;
