//! The API: each request is checked, then answered. Checked means: our `Host`, no other page's `Origin`, and the credential
//! that its route asks for, before a path is said not to exist. No part of a request becomes a path of the file system.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter, Router};
use rustls::pki_types::CertificateDer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shoal_control::Settings;
use shoal_control::controller::state::{JobSpec, Wish};
use shoal_control::message::{JobId, WorkerId};
use shoal_net::identity::{Authority, bears_name, server_name};

use crate::books::Books;
use crate::channel;
use crate::clock::unix_ms;
use crate::drill::{self, Drill};
use crate::driver::{Desk, no_such_job};
use crate::error::{Error, Refusal};
use crate::folder::Folder;
use crate::guard;
use crate::history::History;
use crate::planning::Planner;
use crate::routes::{Access, Endpoint, ROUTES, Route, Verb};
use crate::secret::Secret;
use crate::token::{JoinToken, Roll};
use crate::{metrics, openapi, receipt, view};

/// Of a request's body: a job's description may bear a whole file.
const BODY_BYTES_MAX: usize = 1 << 20;
/// What is read of one that is too large: who is cut off in the middle of it does not hear why.
const BODY_BYTES_READ_MAX: usize = 4 * BODY_BYTES_MAX;
const WAIT_MS_MAX: u64 = 30_000;
const NAME_BYTES_MAX: usize = 200;

/// The header by which a worker says who it is; its certificate has to say the same.
pub const WORKER_HEADER: HeaderName = HeaderName::from_static("shoal-worker");

/// The certificate that the other end of a connection has shown, whose signature TLS has checked.
#[derive(Clone)]
pub struct Peer(pub Option<CertificateDer<'static>>);

pub struct Api {
    pub settings: Settings,
    pub desk: Desk,
    pub history: Arc<History>,
    pub books: Arc<Books>,
    pub folder: Arc<Folder>,
    pub planner: Arc<dyn Planner>,
    pub authority: Authority,
    pub authority_hash: blake3::Hash,
    pub bearer: Secret,
    pub roll: Mutex<Roll>,
    /// Beside addresses, what a `Host` may say.
    pub names: Vec<String>,
    /// Where it is reached, as it was told.
    pub url: String,
    pub links: AtomicU64,
    pub complaints: crate::Complaints,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    pub minutes: u64,
    /// The one name that it is for.
    #[serde(default)]
    pub worker: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenAnswer {
    pub token: String,
    pub expires_ms: u64,
    /// What to paste on the machine that is to join.
    pub command: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    pub name: String,
    /// For a certificate, as PEM.
    pub request: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinAnswer {
    pub certificate: String,
    pub authority: String,
}

/// A drill that is on its way.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DrillAnswer {
    /// Of the worker.
    pub name: String,
    /// Milliseconds since 1970, by the clock of the controller's records.
    pub at_ms: u64,
}

type Answer<T = Response> = std::result::Result<T, Refusal>;

/// The routes as axum wants them.
pub fn router(api: Arc<Api>) -> Router {
    let mut router = Router::new();
    let paths: std::collections::BTreeSet<&str> = ROUTES.iter().map(|route| route.path).collect();
    for path in paths {
        let mut methods = MethodRouter::new();
        for route in ROUTES.iter().filter(|route| route.path == path) {
            let filter = match route.verb {
                Verb::Get => MethodFilter::GET,
                Verb::Post => MethodFilter::POST,
            };
            let api = api.clone();
            methods = methods.on(filter, move |request| enter(api, Some(route), request));
        }
        let api = api.clone();
        router = router.route(path, methods.fallback(move |request| enter(api, None, request)));
    }
    router.fallback(move |request| enter(api, None, request))
}

async fn enter(api: Arc<Api>, route: Option<&'static Route>, request: Request) -> Response {
    let answer = match route {
        Some(route) => api.answer(route, request).await,
        None => api.no_such_route(&request),
    };
    answer.unwrap_or_else(|refusal| {
        let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        respond(status, "application/json", json!({ "error": refusal }).to_string())
    })
}

fn respond(status: StatusCode, kind: &'static str, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn said(body: &impl Serialize) -> Response {
    let body = serde_json::to_string(body).expect("answers are JSON");
    respond(StatusCode::OK, "application/json", body)
}

fn bad(message: impl Into<String>) -> Refusal {
    Refusal::new(400, "request", message)
}

/// The one value of a header. Two are none: which of them counted would depend on who reads.
fn single(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    values.next().is_none().then(|| first.to_str().ok())?
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        match error {
            Error::Refused(refusal) => refusal,
            Error::Identity(error) => bad(error.to_string()),
            other => Refusal::new(500, "controller", other.to_string()),
        }
    }
}

impl Api {
    fn no_such_route(&self, request: &Request) -> Answer {
        self.check_page(request.headers())?;
        self.check_bearer(request.headers())?;
        Err(Refusal::new(404, "no_such_route", "there is no such route, or not with this verb")
            .hint("/api/v1/openapi.json describes what there is"))
    }

    /// That the request is meant for this controller and comes from no other's page.
    fn check_page(&self, headers: &HeaderMap) -> Answer<()> {
        let host = single(headers, header::HOST).filter(|host| guard::host_is_ours(host, &self.names));
        let Some(host) = host else {
            return Err(Refusal::new(421, "host", "the request names another host than this controller")
                .hint("name it at its start: shoal up --host NAME"));
        };
        let foreign = match headers.contains_key(header::ORIGIN) {
            true => {
                !single(headers, header::ORIGIN).is_some_and(|origin| guard::origin_is_ours(origin, host))
            }
            false => false,
        };
        match foreign {
            true => Err(Refusal::new(403, "origin", "the request comes from another page")),
            false => Ok(()),
        }
    }

    fn check_bearer(&self, headers: &HeaderMap) -> Answer<()> {
        let token = single(headers, header::AUTHORIZATION).and_then(guard::bearer);
        match token.is_some_and(|token| self.bearer.is(token)) {
            true => Ok(()),
            false => Err(Refusal::new(401, "unauthorized", "the request's token is not this controller's")
                .hint("commands take it from access.json, in the folder of `shoal up`; SHOAL_ACCESS names another")),
        }
    }

    fn check_join_token(&self, headers: &HeaderMap) -> Answer<JoinToken> {
        let token = single(headers, header::AUTHORIZATION).and_then(guard::bearer);
        let token: Option<JoinToken> = token.and_then(|token| token.parse().ok());
        let refusal = || Refusal::new(401, "unauthorized", "joining needs a join token");
        let token = token.filter(|token| token.authority == self.authority_hash).ok_or_else(refusal)?;
        self.roll().check(&token, unix_ms())?;
        Ok(token)
    }

    /// The name that a worker's certificate proves.
    fn check_certificate(&self, parts: &Parts) -> Answer<String> {
        let refusal = || {
            Refusal::new(
                401,
                "unauthorized",
                "this is for workers, by the certificate they got when they joined",
            )
        };
        let peer = parts.extensions.get::<Peer>().and_then(|peer| peer.0.as_ref()).ok_or_else(refusal)?;
        let name = single(&parts.headers, WORKER_HEADER).ok_or_else(refusal)?;
        crate::token::check_name(name)?;
        let proven = server_name(name).is_ok_and(|proven| bears_name(peer, &proven));
        if !proven {
            return Err(Refusal::new(403, "another_name", format!("the certificate is not {name}'s")));
        }
        Ok(name.to_owned())
    }

    fn roll(&self) -> std::sync::MutexGuard<'_, Roll> {
        self.roll.lock().expect("nobody panics while holding it")
    }

    async fn answer(self: &Arc<Self>, route: &'static Route, request: Request) -> Answer {
        let (mut parts, body) = request.into_parts();
        self.check_page(&parts.headers)?;
        match route.access {
            Access::Bearer => {
                self.check_bearer(&parts.headers)?;
                self.answer_owner(route, &mut parts, body).await
            }
            Access::JoinToken => {
                let token = self.check_join_token(&parts.headers)?;
                self.join(token, read(&parts, body).await?).await
            }
            Access::Certificate => {
                let name = self.check_certificate(&parts)?;
                channel::upgrade(self.clone(), name, &mut parts).await
            }
        }
    }

    async fn answer_owner(self: &Arc<Self>, route: &'static Route, parts: &mut Parts, body: Body) -> Answer {
        let job = JobId(number_of(route, parts, "job").await?);
        let query = parts.uri.query().unwrap_or_default();
        let wrong_query = || bad("the query has something that this route does not know");
        if route.query.is_empty() && !query.is_empty() {
            return Err(wrong_query());
        }
        let following = || guard::numbers(query, ["after", "wait_ms"]).ok_or_else(wrong_query);
        match route.endpoint {
            Endpoint::Workers => {
                let workers = self.desk.look(view::workers).await?;
                Ok(said(&BTreeMap::from([("workers", view::read(workers))])))
            }
            Endpoint::Drill => {
                let worker = WorkerId(number_of(route, parts, "worker").await?);
                let drill = read::<Drill>(parts, body).await?.check()?;
                let name = self.desk.look(move |sight| drill::order(sight, worker, drill)).await??;
                Ok(said(&DrillAnswer { name, at_ms: unix_ms() }))
            }
            Endpoint::Jobs => Ok(said(&BTreeMap::from([("jobs", self.desk.look(view::jobs).await?)]))),
            Endpoint::Job => {
                let view = self.desk.look(move |sight| view::job(sight, job)).await?;
                Ok(said(&view.ok_or_else(|| no_such_job(job))?))
            }
            Endpoint::Submit => self.submit(read(parts, body).await?).await,
            Endpoint::Pause => self.wish(job, Wish::Pause).await,
            Endpoint::Resume => self.wish(job, Wish::Run).await,
            Endpoint::Cancel => self.wish(job, Wish::Cancel).await,
            Endpoint::Logs => self.logs(job, following()?).await,
            Endpoint::Receipt => {
                let receipt = self.desk.look(move |sight| receipt::receipt(sight, job)).await?;
                Ok(said(&receipt.ok_or_else(|| no_such_job(job))?))
            }
            Endpoint::Events => self.events(following()?).await,
            Endpoint::MakeToken => self.make_token(read(parts, body).await?).await,
            Endpoint::Metrics => {
                let text = self.desk.look(metrics::text).await?;
                Ok(respond(StatusCode::OK, "text/plain; version=0.0.4", text))
            }
            Endpoint::Description => Ok(said(&openapi::description())),
            Endpoint::Join | Endpoint::Channel => Err(Refusal::new(404, "no_such_route", "not for owners")),
        }
    }

    async fn submit(self: &Arc<Self>, spec: JobSpec) -> Answer {
        if spec.name.is_empty() || spec.name.len() > NAME_BYTES_MAX || spec.name.chars().any(char::is_control)
        {
            return Err(bad(format!(
                "a job's name has 1 to {NAME_BYTES_MAX} bytes, without control characters"
            )));
        }
        spec.check().map_err(|error| bad(error.to_string()))?;
        let (api, description) = (self.clone(), spec.description.clone());
        let taken = blocking(move || api.planner.take(&description)).await?;
        taken.map_err(|unfit| Refusal { hint: unfit.hint, ..Refusal::new(422, "description", unfit.why) })?;
        let job = self.desk.submit(spec).await?;
        Ok(said(&json!({ "job": job })))
    }

    async fn wish(&self, job: JobId, wish: Wish) -> Answer {
        self.desk.wish(job, wish).await?;
        let view = self.desk.look(move |sight| view::job(sight, job)).await?;
        Ok(said(&view.ok_or_else(|| no_such_job(job))?))
    }

    /// Waits for something to say, if it is asked to.
    async fn events(&self, [after, wait_ms]: [Option<u64>; 2]) -> Answer {
        let mut newest = self.history.newest();
        let wait = Duration::from_millis(wait_ms.unwrap_or(0).min(WAIT_MS_MAX));
        let after = after.unwrap_or(0);
        let _ = tokio::time::timeout(wait, newest.wait_for(|revision| *revision > after)).await;
        let events = self.history.after(after);
        Ok(said(&json!({ "events": events, "revision": *newest.borrow() })))
    }

    async fn logs(&self, job: JobId, [after, wait_ms]: [Option<u64>; 2]) -> Answer {
        let after = after.unwrap_or(0);
        let until =
            tokio::time::Instant::now() + Duration::from_millis(wait_ms.unwrap_or(0).min(WAIT_MS_MAX));
        let (mut newest, mut written) = (self.history.newest(), self.books.written());
        loop {
            newest.mark_unchanged();
            written.mark_unchanged();
            let view =
                self.desk.look(move |sight| view::job(sight, job)).await?.ok_or_else(|| no_such_job(job))?;
            let lines = self.books.after(job, after, view.step);
            let lines = lines.map_err(|error| Refusal::new(500, "books", error.to_string()))?;
            let ended = matches!(view.state.as_str(), "done" | "cancelled" | "failed");
            if !lines.is_empty() || ended || tokio::time::Instant::now() >= until {
                return Ok(said(&json!({ "lines": lines, "job": view })));
            }
            tokio::select! {
                _ = newest.changed() => {}
                _ = written.changed() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    /// For the first one, which is shown when the controller starts, and for those that are asked for.
    pub fn token(&self, minutes: u64, worker: Option<&str>) -> Answer<TokenAnswer> {
        let now_ms = unix_ms();
        let (token, expires_ms) =
            self.roll().make(&self.folder, self.authority_hash, now_ms, minutes, worker)?;
        let named = worker.map_or(String::new(), |worker| format!(" --name {worker}"));
        let command = format!("shoal join {} --token {token}{named}", self.url);
        Ok(TokenAnswer { token: token.to_string(), expires_ms, command })
    }

    async fn make_token(self: &Arc<Self>, request: TokenRequest) -> Answer {
        let api = self.clone();
        let token = blocking(move || api.token(request.minutes, request.worker.as_deref())).await??;
        Ok(said(&token))
    }

    /// The certificate is made before the token is used up, so that a request that cannot be signed costs none; it
    /// leaves when that is on the disk.
    async fn join(self: &Arc<Self>, token: JoinToken, request: JoinRequest) -> Answer {
        let api = self.clone();
        let joined = move || -> Answer<JoinAnswer> {
            crate::token::check_name(&request.name)?;
            let certificate = api.authority.sign(&request.request, &request.name).map_err(Error::from)?;
            api.roll().use_up(&api.folder, &token, &request.name, unix_ms())?;
            Ok(JoinAnswer { certificate, authority: api.authority.certificate_pem().to_owned() })
        };
        Ok(said(&blocking(joined).await??))
    }

    pub fn next_link(&self) -> u64 {
        self.links.fetch_add(1, Ordering::Relaxed)
    }
}

/// What waits for a disk or computes for long, where it holds nobody up.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Answer<T> {
    let failed = |_| Refusal::new(500, "controller", "the controller failed at this request");
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

/// The number in a route's path; zero where there is none.
async fn number_of(route: &Route, parts: &mut Parts, of: &str) -> Answer<u64> {
    if !route.path.contains(&format!("{{{of}}}")) {
        return Ok(0);
    }
    let wrong = || bad(format!("not a {of}'s number"));
    let params = RawPathParams::from_request_parts(parts, &()).await.map_err(|_| wrong())?;
    let number = params.iter().find(|(name, _)| *name == of).and_then(|(_, value)| value.parse().ok());
    number.ok_or_else(wrong)
}

async fn read<T: DeserializeOwned>(parts: &Parts, body: Body) -> Answer<T> {
    let kind = single(&parts.headers, header::CONTENT_TYPE).unwrap_or_default();
    if kind.split(';').next().map(str::trim) != Some("application/json") {
        return Err(Refusal::new(415, "content_type", "bodies are application/json"));
    }
    let large = || {
        let message = format!("the body did not come whole, or has more than {BODY_BYTES_MAX} bytes");
        Refusal::new(413, "too_large", message)
    };
    let bytes = to_bytes(body, BODY_BYTES_READ_MAX).await.map_err(|_| large())?;
    if bytes.len() > BODY_BYTES_MAX {
        return Err(large());
    }
    parse(&bytes)
}

/// A request's body.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Answer<T> {
    serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))
}

/// The refusal in an answer that is none.
pub fn refusal_of(status: u16, body: &[u8]) -> Refusal {
    let said = serde_json::from_slice::<Value>(body)
        .ok()
        .and_then(|mut body| serde_json::from_value::<Refusal>(body.get_mut("error")?.take()).ok());
    match said {
        Some(refusal) => Refusal { status, ..refusal },
        None => Refusal::new(status, "unknown", format!("the controller answered with status {status}")),
    }
}
