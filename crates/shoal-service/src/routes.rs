//! Every route there is, in one table. The server, its description and the tests of who is let in are made from it.

/// What one has to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The API's token.
    Bearer,
    /// A join token, once.
    JoinToken,
    /// A worker's certificate, in the TLS handshake.
    Certificate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Get,
    Post,
}

impl Verb {
    pub fn name(self) -> &'static str {
        match self {
            Verb::Get => "GET",
            Verb::Post => "POST",
        }
    }
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Workers,
    Drill,
    Jobs,
    Submit,
    Job,
    Pause,
    Resume,
    Cancel,
    Logs,
    Receipt,
    Events,
    MakeToken,
    Join,
    Channel,
    Metrics,
    Description,
}

#[derive(Clone, Copy, Debug)]
pub struct Route {
    pub verb: Verb,
    /// With `{job}` or `{worker}` where the number of one stands.
    pub path: &'static str,
    pub access: Access,
    pub endpoint: Endpoint,
    pub summary: &'static str,
    /// Numbers that the query may have.
    pub query: &'static [&'static str],
    /// The name of the body's schema.
    pub body: Option<&'static str>,
}

const fn route(verb: Verb, path: &'static str, endpoint: Endpoint, summary: &'static str) -> Route {
    Route { verb, path, access: Access::Bearer, endpoint, summary, query: &[], body: None }
}

/// What one who follows along may say: after which number, and how long to wait for more.
const FOLLOWING: &[&str] = &["after", "wait_ms"];

pub const ROUTES: &[Route] = &[
    route(Verb::Get, "/api/v1/workers", Endpoint::Workers, "The workers that are alive"),
    Route {
        body: Some("Drill"),
        ..route(
            Verb::Post,
            "/api/v1/workers/{worker}/drill",
            Endpoint::Drill,
            "Have a worker do a fault to itself",
        )
    },
    route(Verb::Get, "/api/v1/jobs", Endpoint::Jobs, "All jobs"),
    Route { body: Some("JobSpec"), ..route(Verb::Post, "/api/v1/jobs", Endpoint::Submit, "Submit a job") },
    route(Verb::Get, "/api/v1/jobs/{job}", Endpoint::Job, "One job"),
    route(Verb::Post, "/api/v1/jobs/{job}/pause", Endpoint::Pause, "Stop a job at a step's end, and save it"),
    route(Verb::Post, "/api/v1/jobs/{job}/resume", Endpoint::Resume, "Let a paused job go on"),
    route(Verb::Post, "/api/v1/jobs/{job}/cancel", Endpoint::Cancel, "End a job for good"),
    Route {
        query: FOLLOWING,
        ..route(Verb::Get, "/api/v1/jobs/{job}/logs", Endpoint::Logs, "What each counted step came to")
    },
    route(Verb::Get, "/api/v1/jobs/{job}/receipt", Endpoint::Receipt, "Where a job's time and money went"),
    Route {
        query: FOLLOWING,
        ..route(Verb::Get, "/api/v1/events", Endpoint::Events, "What the controller has recorded")
    },
    Route {
        body: Some("TokenRequest"),
        ..route(Verb::Post, "/api/v1/tokens", Endpoint::MakeToken, "Make a token that lets one worker join")
    },
    Route {
        access: Access::JoinToken,
        body: Some("JoinRequest"),
        ..route(Verb::Post, "/api/v1/join", Endpoint::Join, "Get a worker's certificate for a token")
    },
    Route {
        access: Access::Certificate,
        ..route(Verb::Get, "/api/v1/channel", Endpoint::Channel, "A worker's WebSocket")
    },
    route(Verb::Get, "/metrics", Endpoint::Metrics, "Figures for Prometheus"),
    route(Verb::Get, "/api/v1/openapi.json", Endpoint::Description, "This description"),
];
