//! The API's description, made from the table of its routes.

use serde_json::{Map, Value, json};

use crate::routes::{Access, ROUTES, Route};

pub fn description() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.verb.name().to_ascii_lowercase()] = operation(route);
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "shoal controller", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "join_token": { "type": "http", "scheme": "bearer", "description": "a join token, good once" },
                "certificate": { "type": "mutualTLS" },
            },
            "schemas": schemas(),
        },
    })
}

fn operation(route: &Route) -> Value {
    let number = |place: &str, name: &str| {
        let schema = json!({ "type": "integer", "minimum": 0 });
        json!({ "name": name, "in": place, "required": place == "path", "schema": schema })
    };
    let named = |name: &&str| route.path.contains(&format!("{{{name}}}"));
    let in_path = ["job", "worker"].into_iter().filter(named).map(|name| number("path", name));
    let parameters: Vec<Value> =
        in_path.chain(route.query.iter().map(|name| number("query", name))).collect();
    let scheme = match route.access {
        Access::Bearer => "bearer",
        Access::JoinToken => "join_token",
        Access::Certificate => "certificate",
    };
    let refusal = json!({
        "description": "refused",
        "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Refusal" } } },
    });
    let mut operation = json!({
        "operationId": format!("{:?}", route.endpoint),
        "summary": route.summary,
        "security": [{ scheme: [] }],
        "parameters": parameters,
        "responses": { "200": { "description": "done" }, "default": refusal },
    });
    if let Some(body) = route.body {
        let schema = json!({ "$ref": format!("#/components/schemas/{body}") });
        operation["requestBody"] =
            json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    operation
}

fn schemas() -> Value {
    let (text, count) = (json!({ "type": "string" }), json!({ "type": "integer", "minimum": 0 }));
    let object = |required: &[&str], properties: Value| {
        json!({
            "type": "object", "required": required, "properties": properties, "additionalProperties": false,
        })
    };
    json!({
        "Refusal": object(&["code", "message"], json!({ "code": text, "message": text, "hint": text })),
        "JobSpec": object(
            &[
                "name", "class", "priority", "steps", "workers_min", "workers_max", "checkpoint_every",
                "checkpoints_kept", "description",
            ],
            json!({
                "name": text,
                "class": { "enum": ["foreground", "background"] },
                "priority": { "type": "integer" },
                "steps": count, "workers_min": count, "workers_max": count,
                "checkpoint_every": {
                    "oneOf": [
                        { "const": "auto" },
                        { "type": "object", "required": ["steps"], "properties": { "steps": count } },
                    ],
                },
                "checkpoints_kept": count,
                "description": text,
            }),
        ),
        "Drill": object(
            &["kind"],
            json!({ "kind": { "enum": ["kill", "freeze", "cut", "slow"] }, "ms": count, "percent": count }),
        ),
        "TokenRequest": object(&["minutes"], json!({ "minutes": count, "worker": text })),
        "JoinRequest": object(&["name", "request"], json!({ "name": text, "request": text })),
    })
}
