-- Comments of jobs for cachemate: cachemate:profile=NAME,max-slowdown=PERCENT,class=victim|aggressor
-- slurm.conf: JobSubmitPlugins=lua. Jobs without such a comment are not looked at.

-- The values that prolog.sh writes.
local function is_percent(text)
  local whole, point, fraction = text:match("^(%d+)(%.?)(%d*)$")
  if whole == nil or #whole > 5 or #fraction > 3 then return false end
  return (point == "") == (fraction == "")
end

-- Keys of a comment, or nil and the mistake.
local function parse(comment)
  local marks = {}
  local text = comment:match("^cachemate:(.*)$")
  if text == nil then return nil, nil end
  for mark in text:gmatch("[^,]+") do
    local key, value = mark:match("^([%w%-]+)=(.+)$")
    if key == "profile" and value:match("^[%w%.%-]+$") and #value <= 253 then
      marks.profile = value
    elseif key == "max-slowdown" and is_percent((value:gsub("%%$", ""))) then
      marks.max_slowdown = tonumber((value:gsub("%%$", "")))
    elseif key == "class" and (value == "victim" or value == "aggressor") then
      marks.class = value
    else
      return nil, "cachemate: found '" .. mark .. "', expected profile=NAME, max-slowdown=PERCENT, class=victim or aggressor"
    end
  end
  return marks, nil
end

local function check(job_desc)
  local comment = job_desc.comment
  if comment == nil or comment == "" then return slurm.SUCCESS end
  local _, mistake = parse(comment)
  if mistake ~= nil then
    slurm.log_user(mistake)
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_job_submit(job_desc, part_list, submit_uid)
  return check(job_desc)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return check(job_desc)
end

return slurm.SUCCESS
