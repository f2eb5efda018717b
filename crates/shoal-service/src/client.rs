//! The API from a command's side: blocking, one request at a time. Questions that follow each other share a connection.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shoal_control::controller::state::JobSpec;
use tokio::runtime::{Builder, Runtime};

use crate::access::Access;
use crate::api::{DrillAnswer, TokenAnswer, TokenRequest, refusal_of};
use crate::drill::Drill;
use crate::error::{Error, Result};
use crate::history::Noted;
use crate::http::{Answer, Call, Failure, Line, Target, ask_on};
use crate::receipt::ReceiptView;
use crate::secret::Secret;
use crate::tls;
use crate::view::{JobView, WorkerView};

const PATIENCE: Duration = Duration::from_secs(10);
const ANSWER_BYTES_MAX: usize = 1 << 28;
/// How long one question waits for news.
const WAIT_MS: u64 = 20_000;

/// A connection that was not used for so long is not used again: its other end closes it after a while.
const KEPT_MAX: Duration = Duration::from_secs(2);

pub struct Client {
    target: Target,
    token: Secret,
    tls: Arc<ClientConfig>,
    /// Who asks takes it, and puts back what it leaves; who finds none opens its own.
    kept: Mutex<Option<Kept>>,
}

/// A connection between two questions.
struct Kept {
    runtime: Runtime,
    line: Line,
    since: Instant,
}

#[derive(Deserialize)]
struct Workers {
    workers: Vec<WorkerView>,
}

#[derive(Deserialize)]
struct Jobs {
    jobs: Vec<JobView>,
}

#[derive(Deserialize)]
struct Submitted {
    job: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Events {
    pub events: Vec<Noted>,
    pub revision: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Logs {
    pub lines: Vec<Value>,
    pub job: JobView,
}

impl Client {
    /// `url` where it differs from what the access says: the same controller under another address.
    pub fn new(access: &Access, url: Option<&str>) -> Result<Client> {
        let target: Target = url.unwrap_or(&access.url).parse()?;
        if !target.tls {
            return Err(Error::Url { url: target.to_string() });
        }
        Ok(Client {
            target,
            token: access.token.clone(),
            tls: tls::trusting(&access.authority)?,
            kept: Mutex::new(None),
        })
    }

    pub fn workers(&self) -> Result<Vec<WorkerView>> {
        Ok(self.get::<Workers>("/api/v1/workers", PATIENCE)?.workers)
    }

    pub fn drill(&self, worker: u64, drill: Drill) -> Result<DrillAnswer> {
        let body = serde_json::to_value(drill).expect("a drill is JSON");
        self.post(&format!("/api/v1/workers/{worker}/drill"), &body)
    }

    pub fn jobs(&self) -> Result<Vec<JobView>> {
        Ok(self.get::<Jobs>("/api/v1/jobs", PATIENCE)?.jobs)
    }

    pub fn job(&self, job: u64) -> Result<JobView> {
        self.get(&format!("/api/v1/jobs/{job}"), PATIENCE)
    }

    pub fn submit(&self, spec: &JobSpec) -> Result<u64> {
        Ok(self.post::<Submitted>("/api/v1/jobs", &serde_json::to_value(spec).expect("a spec is JSON"))?.job)
    }

    /// `verb` is pause, resume or cancel.
    pub fn wish(&self, job: u64, verb: &str) -> Result<JobView> {
        self.post(&format!("/api/v1/jobs/{job}/{verb}"), &Value::Null)
    }

    pub fn token(&self, minutes: u64, worker: Option<String>) -> Result<TokenAnswer> {
        let request = TokenRequest { minutes, worker };
        self.post("/api/v1/tokens", &serde_json::to_value(request).expect("a request is JSON"))
    }

    /// What was recorded after a revision; waits for it if asked to.
    pub fn events(&self, after: u64, wait: bool) -> Result<Events> {
        let (wait_ms, within) = waiting(wait);
        self.get(&format!("/api/v1/events?after={after}&wait_ms={wait_ms}"), within)
    }

    /// What the counted steps after this one came to; waits for one if asked to.
    pub fn logs(&self, job: u64, after: u64, wait: bool) -> Result<Logs> {
        let (wait_ms, within) = waiting(wait);
        self.get(&format!("/api/v1/jobs/{job}/logs?after={after}&wait_ms={wait_ms}"), within)
    }

    /// Where a job's time and money went until now.
    pub fn receipt(&self, job: u64) -> Result<ReceiptView> {
        self.get(&format!("/api/v1/jobs/{job}/receipt"), PATIENCE)
    }

    fn get<T: DeserializeOwned>(&self, path: &str, within: Duration) -> Result<T> {
        self.call("GET", path, Vec::new(), within)
    }

    fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T> {
        self.call("POST", path, serde_json::to_vec(body).expect("a body is JSON"), PATIENCE)
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Vec<u8>,
        within: Duration,
    ) -> Result<T> {
        let headers = vec![
            ("authorization", format!("Bearer {}", self.token.expose())),
            ("content-type", "application/json".to_owned()),
        ];
        let call = || Call {
            method,
            path,
            headers: headers.clone(),
            body: body.clone(),
            within,
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        // What asks for something to be done must not be said twice, and a connection may break before it tells.
        let kept = self.take_kept().filter(|_| method == "GET");
        let again = kept.and_then(|kept| self.ask(kept.runtime, Some(kept.line), call()).ok());
        let answer = match again {
            Some(answer) => answer,
            None => {
                let no_runtime = |error: std::io::Error| Failure::Unreachable(error.to_string());
                let runtime = Builder::new_current_thread().enable_all().build().map_err(no_runtime);
                let answer = runtime.and_then(|runtime| self.ask(runtime, None, call()));
                answer.map_err(|failure| failure.at(&self.target))?
            }
        };
        if answer.status != 200 {
            return Err(refusal_of(answer.status, &answer.body).into());
        }
        serde_json::from_slice(&answer.body)
            .map_err(|error| Error::Answer { url: self.target.to_string(), cause: error.to_string() })
    }

    fn take_kept(&self) -> Option<Kept> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        kept.filter(|kept| kept.since.elapsed() < KEPT_MAX)
    }

    fn ask(&self, runtime: Runtime, line: Option<Line>, call: Call) -> std::result::Result<Answer, Failure> {
        let (answer, line) = runtime.block_on(ask_on(line, &self.target, Some(&self.tls), call))?;
        let kept = Kept { runtime, line, since: Instant::now() };
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
        Ok(answer)
    }
}

fn waiting(wait: bool) -> (u64, Duration) {
    let wait_ms = if wait { WAIT_MS } else { 0 };
    (wait_ms, PATIENCE + Duration::from_millis(wait_ms))
}
