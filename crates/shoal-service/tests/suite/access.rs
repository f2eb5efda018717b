//! Who is let in: every route and verb there is, taken from the table itself, refuses who shows nothing or the wrong thing.

use crate::common::*;
use shoal_service::Error;
use shoal_service::client::Client;
use shoal_service::http::{Call, Failure, block_on, exchange};
use shoal_service::routes::{Access, ROUTES, Route};
use shoal_service::token::JoinToken;
use shoal_service::{membership, tls};

const VERBS: [&str; 7] = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"];

fn path(route: &Route) -> String {
    route.path.replace("{job}", "1").replace("{worker}", "1")
}

fn code(body: &[u8]) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).expect("refusals are JSON");
    body["error"]["code"].as_str().expect("a code").to_owned()
}

#[test]
fn every_route_and_verb_refuses_without_and_with_wrong_credentials() {
    let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (fleet, stranger) = (controller(folder.path(), 0), controller(other.path(), 0));
    let own_token = fleet.token(5).expect("a token").token;
    let strange_token = stranger.token(5).expect("a token").token;
    let strange_bearer = stranger.access().token.expose().to_owned();
    let own_bearer = fleet.access().token.expose().to_owned();
    let mut tried = 0;
    for route in ROUTES {
        let mut shown = vec![
            vec![("content-type", "application/json".to_owned())],
            bearer(""),
            bearer("wrong"),
            bearer(&strange_bearer),
            bearer(&strange_token),
            bearer(&own_bearer[1..]),
            vec![("authorization", format!("Basic {own_bearer}"))],
            // Which of two counts would depend on who reads.
            vec![("authorization", format!("Bearer {own_bearer}")), ("authorization", "Bearer wrong".into())],
        ];
        // What opens one kind of route opens no other.
        match route.access {
            Access::Bearer => shown.push(bearer(&own_token)),
            Access::JoinToken => shown.push(bearer(&own_bearer)),
            Access::Certificate => shown.extend([bearer(&own_bearer), bearer(&own_token)]),
        }
        for verb in VERBS {
            // The API's token is good for asking what there is not.
            let own_route = verb == route.verb.name() || (verb == "HEAD" && route.verb.name() == "GET");
            for headers in &shown {
                let good_elsewhere =
                    headers.iter().any(|(_, value)| value == &format!("Bearer {own_bearer}"))
                        && headers.iter().filter(|(name, _)| *name == "authorization").count() == 1;
                let answer = request(&fleet, verb, &path(route), headers, "{}");
                let expected = if good_elsewhere && !own_route { 404 } else { 401 };
                assert_eq!(answer.status, expected, "{verb} {} with {headers:?}", route.path);
                tried += 1;
            }
        }
    }
    assert_eq!(
        tried,
        ROUTES.len() * VERBS.len() * 9
            + VERBS.len() * ROUTES.iter().filter(|route| route.access == Access::Certificate).count()
    );
    assert_eq!(request(&fleet, "GET", "/etc/passwd", &[], "").status, 401);
    assert_eq!(request(&fleet, "GET", "/../../etc/passwd", &bearer(&own_bearer), "").status, 404);
    assert_eq!(request(&fleet, "GET", "/api/v1/jobs/..%2F..%2Flog", &bearer(&own_bearer), "").status, 400);
    // None of it used the token up, and the right credentials are good.
    let token: JoinToken = own_token.parse().expect("a token");
    membership::join(&target(&fleet), &token, "one").expect("it joins");
    for route in ROUTES.iter().filter(|route| route.access == Access::Bearer && route.verb.name() == "GET") {
        let answer = request(&fleet, "GET", &path(route), &bearer(&own_bearer), "");
        let expected = if route.path.contains("{job}") { 404 } else { 200 };
        assert_eq!(answer.status, expected, "{}", route.path);
    }
}

#[test]
fn the_description_names_every_route() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let answer = request(&fleet, "GET", "/api/v1/openapi.json", &bearer(fleet.access().token.expose()), "");
    let described: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
    for route in ROUTES {
        let operation = &described["paths"][route.path][route.verb.name().to_ascii_lowercase()];
        assert_eq!(operation["summary"], route.summary, "{}", route.path);
        assert!(operation["security"].is_array(), "{}", route.path);
    }
}

#[test]
fn other_pages_and_other_names_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let host = target(&fleet).authority();
    let with = |name: &'static str, value: &str| {
        let mut headers = bearer(fleet.access().token.expose());
        headers.push((name, value.to_owned()));
        request(&fleet, "GET", "/api/v1/jobs", &headers, "").status
    };
    assert_eq!(with("origin", &format!("https://{host}")), 200);
    assert_eq!(with("origin", "https://evil.example"), 403);
    assert_eq!(with("origin", "null"), 403);
    // A second `Host` beside the right one: whichever counted, it is refused.
    assert!([400, 421].contains(&with("host", "evil.example")));
}

#[test]
fn bodies_are_json_and_no_larger_than_they_may_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let owner = bearer(fleet.access().token.expose());
    let submit = |headers: &[(&str, String)], body: &str| {
        let answer = request(&fleet, "POST", "/api/v1/jobs", headers, body);
        (answer.status, code(&answer.body))
    };
    assert_eq!(submit(&owner[..1], "{}"), (415, "content_type".into()));
    assert_eq!(submit(&owner, "{"), (400, "request".into()));
    let unknown = "{\"name\":\"x\",\"path\":\"/etc/passwd\"}";
    assert_eq!(submit(&owner, unknown), (400, "request".into()));
    let large = format!("\"{}\"", "x".repeat(2 << 20));
    assert_eq!(submit(&owner, &large), (413, "too_large".into()));
    let mut spec = spec("toy", 3);
    spec.description = "unreadable".into();
    let text = serde_json::to_string(&spec).expect("JSON");
    assert_eq!(submit(&owner, &text), (422, "description".into()));
    assert!(client(&fleet).jobs().expect("jobs").is_empty());
}

#[test]
fn commands_know_their_own_fleet() {
    let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (fleet, stranger) = (controller(folder.path(), 0), controller(other.path(), 0));
    let elsewhere = Client::new(fleet.access(), Some(&stranger.access().url)).expect("a client");
    assert!(matches!(elsewhere.jobs(), Err(Error::OtherFleet { .. })));
    let mut forged = fleet.access().clone();
    forged.token = stranger.access().token.clone();
    let refused = Client::new(&forged, None).expect("a client").jobs();
    let Err(Error::Refused(refusal)) = refused else { panic!("{refused:?}") };
    assert_eq!((refusal.status, refusal.code.as_str()), (401, "unauthorized"));
    let gone = Client::new(fleet.access(), Some("https://127.0.0.1:1")).expect("a client");
    assert!(matches!(gone.jobs(), Err(Error::Unreachable { .. })));
}

#[test]
fn a_token_joins_once_and_only_where_it_was_made() {
    let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (fleet, stranger) = (controller(folder.path(), 0), controller(other.path(), 0));
    let token = |controller: &shoal_service::server::Controller| -> JoinToken {
        controller.token(5).expect("a token").token.parse().expect("a token")
    };
    let first = token(&fleet);
    let elsewhere = membership::join(&target(&stranger), &first, "one");
    assert!(matches!(elsewhere, Err(Error::TokenOfOtherFleet { .. })), "{elsewhere:?}");
    membership::join(&target(&fleet), &first, "one").expect("its first use");
    let refusal = |result: shoal_service::Result<_>| match result {
        Err(Error::Refused(refusal)) => refusal.code,
        other => panic!("{:?}", other.map(|_: shoal_net::identity::Identity| ())),
    };
    assert_eq!(refusal(membership::join(&target(&fleet), &first, "two")), "token_used");
    assert_eq!(refusal(membership::join(&target(&fleet), &token(&fleet), "one")), "name_taken");
    let port = target(&fleet).port;
    drop(fleet);
    let fleet = controller(folder.path(), port);
    assert_eq!(refusal(membership::join(&target(&fleet), &first, "two")), "token_used");
    assert_eq!(refusal(membership::join(&target(&fleet), &token(&fleet), "Not A Name")), "name");
    // A request that is none costs no token.
    let second = token(&fleet);
    let body = "{\"name\":\"two\",\"request\":\"-----BEGIN CERTIFICATE REQUEST-----\"}";
    let answer = request(&fleet, "POST", "/api/v1/join", &bearer(&second.to_string()), body);
    assert_eq!(answer.status, 400);
    membership::join(&target(&fleet), &second, "two").expect("it is still good");
}

/// What a worker's certificate gets at the channel's door, claiming a name.
fn knock(
    controller: &shoal_service::server::Controller,
    identity: &shoal_net::identity::Identity,
    name: &str,
) -> Result<u16, Failure> {
    let tls = tls::member(identity).expect("an identity");
    let call = Call {
        method: "GET",
        path: "/api/v1/channel",
        headers: vec![
            ("shoal-worker", name.to_owned()),
            ("connection", "upgrade".into()),
            ("upgrade", "websocket".into()),
            ("sec-websocket-version", "13".into()),
            ("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==".into()),
        ],
        body: Vec::new(),
        within: PATIENCE,
        answer_bytes_max: 1 << 16,
    };
    let answer = block_on(exchange(&target(controller), Some(&tls), call)).expect("a runtime");
    answer.map(|answer| answer.status)
}

#[test]
fn workers_of_other_fleets_and_under_others_names_are_turned_away() {
    let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (fleet, stranger) = (controller(folder.path(), 0), controller(other.path(), 0));
    let join = |controller, name| {
        let controller: &shoal_service::server::Controller = controller;
        let token: JoinToken = controller.token(5).expect("a token").token.parse().expect("a token");
        membership::join(&target(controller), &token, name).expect("it joins")
    };
    let (one, foreign) = (join(&fleet, "one"), join(&stranger, "one"));
    join(&fleet, "two");
    assert_eq!(knock(&fleet, &one, "one").expect("an answer"), 101);
    assert_eq!(knock(&fleet, &one, "two").expect("an answer"), 403);
    // The same key and name, but the other fleet's signature: the handshake itself fails, on whichever side first.
    let forged = shoal_net::identity::Identity::from_pem(
        foreign.certificate_pem(),
        foreign.key_pem(),
        one.authority_pem(),
    );
    assert!(knock(&fleet, &forged.expect("an identity"), "one").is_err());
    assert!(knock(&fleet, &foreign, "one").is_err());
    // A worker's certificate does not make a controller.
    let imposter = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("https://{}", imposter.local_addr().expect("an address"));
    let config = tls::server(&one).expect("a configuration");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = imposter.accept().expect("a connection");
        let mut connection = rustls::ServerConnection::new(config).expect("a connection");
        while connection.is_handshaking() && connection.complete_io(&mut stream).is_ok() {}
    });
    let lured = Client::new(fleet.access(), Some(&url)).expect("a client").jobs();
    assert!(matches!(lured, Err(Error::OtherFleet { .. })), "{lured:?}");
    server.join().expect("it ends");
}
