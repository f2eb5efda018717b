//! A worker's connection at the controller: one WebSocket, whose other end has proven its name. It passes messages on and
//! knows nothing of what they say.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::request::Parts;
use axum::response::Response;
use shoal_control::message::JobId;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep_until, timeout};

use crate::api::Api;
use crate::driver::{Ask, Link};
use crate::error::Refusal;
use crate::wire::{self, Down, READ_BYTES, StepLine, UP_BYTES_MAX, Up};

/// Messages to a worker that are under way. What does not fit is dropped: it is said again.
const DOWN_MAX: usize = 64;
/// Messages of a worker that nobody has looked at yet.
const UP_MAX: usize = 16;
/// Workers speak several times a second. One that has not for so long is not there any more, whatever TCP thinks.
const SILENCE_MAX: Duration = Duration::from_secs(20);
const SEND_MAX: Duration = Duration::from_secs(10);

pub async fn upgrade(api: Arc<Api>, name: String, parts: &mut Parts) -> Result<Response, Refusal> {
    let upgrade = WebSocketUpgrade::from_request_parts(parts, &())
        .await
        .map_err(|_| Refusal::new(426, "upgrade", "this route is a WebSocket"))?;
    let upgrade =
        upgrade.max_message_size(UP_BYTES_MAX).max_frame_size(UP_BYTES_MAX).read_buffer_size(READ_BYTES);
    Ok(upgrade.on_upgrade(move |socket| serve(api, name, socket)))
}

async fn serve(api: Arc<Api>, name: String, mut socket: WebSocket) {
    let number = api.next_link();
    let (to, from) = mpsc::channel(DOWN_MAX);
    if send(&mut socket, &Down::Settings(api.settings)).await.is_err() {
        return;
    }
    api.desk.tell(Ask::Connected { name: name.clone(), link: Link { number, to } });
    if let Err(why) = pass(&api, &name, number, &mut socket, from).await {
        (api.complaints)(&format!("{name}: its connection is closed: {why}"));
    }
    api.desk.tell(Ask::Closed { name, number });
    let _ = timeout(SEND_MAX, socket.send(Message::Close(None))).await;
}

/// Until either side ends it, or the worker says what no worker says.
async fn pass(
    api: &Api,
    name: &str,
    number: u64,
    socket: &mut WebSocket,
    mut from: mpsc::Receiver<Down>,
) -> Result<(), String> {
    let room = Arc::new(Semaphore::new(UP_MAX));
    // One clock for the whole connection: messages come too often to set one for each.
    let mut heard_at = Instant::now();
    let silence = sleep_until(heard_at + SILENCE_MAX);
    tokio::pin!(silence);
    loop {
        tokio::select! {
            () = &mut silence => {
                if heard_at.elapsed() >= SILENCE_MAX {
                    return Err("it has been silent for too long".into());
                }
                silence.as_mut().reset(heard_at + SILENCE_MAX);
            }
            down = from.recv() => {
                let Some(down) = down else { return Ok(()) };
                if send(socket, &down).await.is_err() {
                    return Ok(());
                }
            }
            heard = socket.recv() => {
                heard_at = Instant::now();
                let text = match heard {
                    None | Some(Err(_) | Ok(Message::Close(_))) => return Ok(()),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
                    Some(Ok(Message::Binary(_))) => return Err("it sent bytes where text belongs".into()),
                    Some(Ok(Message::Text(text))) => text,
                };
                match wire::up(&text)? {
                    Up::Control(message) => {
                        let room = room.clone().acquire_owned().await.map_err(|error| error.to_string())?;
                        let (name, message) = (name.to_owned(), Box::new(message));
                        api.desk.tell(Ask::Heard { name, number, message, room });
                    }
                    Up::Steps { job, lines } => {
                        let kept = keep(api, job, &lines)?;
                        if send(socket, &kept).await.is_err() {
                            return Ok(());
                        }
                    }
                }
            }
        }
    }
}

/// Lines of a job that is not there are as good as kept: nobody will ask for them.
fn keep(api: &Api, job: JobId, lines: &[StepLine]) -> Result<Down, String> {
    if let Some(Err(error)) = api.books.keep(job, lines) {
        return Err(format!("the books of job {} cannot be written: {error}", job.0));
    }
    Ok(Down::Kept { job, steps: lines.iter().map(|line| line.step).collect() })
}

async fn send(socket: &mut WebSocket, down: &Down) -> Result<(), ()> {
    let text = serde_json::to_string(down).expect("messages are JSON");
    match timeout(SEND_MAX, socket.send(Message::Text(text.into()))).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(()),
    }
}
